//! Flags of `rlhf plan`, before the command that it plans.

use rlhf_base::Result;
use rlhf_base::name_of;
use rlhf_base::schema::{ByteSize, MOST_RANKS, RUN, Settings, all, at_least_one, at_most, expect};

/// Least memory, in bytes.
const LEAST_MEMORY: usize = 1_000_000;

/// Flags of `rlhf plan`, before the command that it plans.
#[derive(Debug, Clone, PartialEq, Settings)]
pub struct PlanFlags {
    /// Print the plan as one JSON object, sizes in bytes.
    #[setting(heading = RUN, short = "print JSON")]
    pub json: bool,
    /// Memory of the machine, which its ranks share, or of each GPU, such as 24GB or 80GiB [default: what is available now].
    #[setting(heading = RUN, short = "memory to plan for [what is free]")]
    pub memory: Option<ByteSize>,
    /// Number of ranks on each machine.
    #[setting(aliases = ["nproc", "num_gpus"], heading = RUN, default = 1, most = MOST_RANKS, short = "ranks on this machine")]
    pub nproc_per_node: usize,
    /// Number of machines.
    #[setting(aliases = ["num_nodes", "num_machines"], heading = RUN, default = 1, most = MOST_RANKS, short = "number of machines")]
    pub nnodes: usize,
    /// Measure this machine for about two seconds, so that the plan has times; `false` leaves them out.
    #[setting(heading = RUN, default = true, short = "false: no times")]
    pub calibrate: bool,
}

impl PlanFlags {
    /// Checks every flag.
    ///
    /// # Errors
    /// A line for each flag that is out of its range.
    pub fn check(&self) -> Result<()> {
        all([
            at_least_one(name_of!(self.nproc_per_node), self.nproc_per_node),
            at_most::<Self>(name_of!(self.nproc_per_node), self.nproc_per_node),
            at_least_one(name_of!(self.nnodes), self.nnodes),
            at_most::<Self>(name_of!(self.nnodes), self.nnodes),
            self.check_memory(),
        ])
    }
    /// Refuses a number that has lost its unit: 24 is 24 bytes.
    fn check_memory(&self) -> Result<()> {
        let bytes = self.memory.map_or(LEAST_MEMORY, |size| size.0);
        expect(bytes >= LEAST_MEMORY, name_of!(self.memory), bytes, "1MB or more, with its unit, such as 24GB or 80GiB")
    }
}
