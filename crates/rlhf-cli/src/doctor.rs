//! `rlhf doctor`: examines this build, the machine, the hub and Python, and trains a tiny model.
//!
//! [`examine`] reports one [`Finding`] per check. The self-test runs in a process of its own, so that a crash in it (an instruction that
//! the processor lacks, no memory) is a finding too.

mod finding;
mod gpu;
mod machine;
mod network;
mod process;
mod self_test;

use rlhf::device;
use rlhf::settings::DoctorConfig;
use std::process::Command;

pub use finding::{Build, Finding, Status, Step};
pub use self_test::self_test;

/// Runs every check that `config` does not exclude, and reports each as it starts and ends.
///
/// `start_self_test` makes the command of a process that calls [`self_test()`] with the device that it is given, and prints each [`Step`]
/// as a line of JSON.
pub fn examine(
    config: &DoctorConfig,
    build: Build,
    start_self_test: impl Fn(&str) -> Command,
    report: &mut dyn FnMut(Step),
) {
    device::use_threads(None);
    let mut report_finding = |finding: Finding| report(Step::Found(finding));
    report_finding(machine::rlhf(build));
    report_finding(machine::libtorch());
    report_finding(machine::cpu());
    report_finding(machine::threads());
    report_finding(machine::memory());
    machine::disks().into_iter().for_each(&mut report_finding);
    report(Step::Checking("gpu".into()));
    let (gpu_findings, has_gpu) = gpu::examine();
    gpu_findings.into_iter().for_each(|finding| report(Step::Found(finding)));
    report(Step::Checking("hub".into()));
    report(Step::Found(network::hub(config.offline)));
    report(Step::Checking("python".into()));
    report(Step::Found(network::python()));
    if !config.no_self_test {
        for device in [Some("cpu"), has_gpu.then_some("cuda")].into_iter().flatten() {
            process::self_test(start_self_test(device), device, process::LIMIT, report);
        }
    }
}
