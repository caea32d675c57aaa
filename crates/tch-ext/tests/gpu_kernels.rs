//! The kernels for GPUs: their sources on the processor, and on a GPU where there is one.

use tch::Device;
use tch_ext::{ThreadOrder, check_gpu_kernels, check_gpu_kernels_in, gpu_kernels};

fn all_were_started() {
    let idle: Vec<String> = gpu_kernels().into_iter().filter(|of| of.starts == 0).map(|of| of.name).collect();
    assert!(idle.is_empty(), "not compared: {idle:?}");
}

#[test]
fn every_kernel_computes_what_libtorch_does_when_its_source_runs_on_the_processor() {
    check_gpu_kernels(Device::Cpu).unwrap();
    all_were_started();
    // In this test, as one at a time may emulate them.
    for order in [ThreadOrder::Down, ThreadOrder::Shuffled] {
        check_gpu_kernels_in(order).unwrap_or_else(|error| panic!("{order:?}: {error}"));
    }
}

#[test]
#[ignore = "needs a GPU, `make cuda` and RLHF_TEST_CUDA=1"]
fn every_kernel_compiles_loads_and_computes_what_libtorch_does_on_a_gpu() {
    if std::env::var_os("RLHF_TEST_CUDA").is_none() {
        return;
    }
    tch_ext::load_cuda().unwrap();
    let folder = std::env::temp_dir().join(format!("rlhf-kernels-{}", std::process::id()));
    // Compares them too.
    tch_ext::use_gpu_kernels(0, Some(&folder)).unwrap();
    all_were_started();
    let entries = std::fs::read_dir(&folder).unwrap().count();
    let _ = std::fs::remove_dir_all(&folder);
    assert_eq!(entries, 8, "binaries of sources");
}
