//! Flags of `rlhf launch`, before the command that it starts.

use std::path::PathBuf;

use rlhf_base::Result;
use rlhf_base::name_of;
use rlhf_base::schema::{MOST_PORT, MOST_RANKS, RUN, Settings, all, at_least_one, at_most, expect};

/// The port of several machines, which all must know: torchrun's default.
const PORT: u16 = 29500;

/// Flags of `rlhf launch`, before the command that it starts.
#[derive(Debug, Clone, PartialEq, Settings)]
pub struct LaunchFlags {
    /// Number of ranks on this machine [default: one per GPU; 1 without a GPU or with --device cpu].
    #[setting(alias = "num_gpus", heading = RUN, most = MOST_RANKS, short = "ranks on this machine")]
    pub nproc_per_node: Option<usize>,
    /// Number of times that all ranks are started again after one of them failed. Training resumes from its newest checkpoint.
    #[setting(heading = RUN, default = 0, most = MOST_RANKS, short = "restarts after a failed rank")]
    pub max_restarts: usize,
    /// Number of machines; each runs the same line with its own node_rank.
    #[setting(aliases = ["num_nodes", "num_machines"], heading = RUN, default = 1, most = MOST_RANKS, short = "number of machines")]
    pub nnodes: usize,
    /// Number of this machine, from 0.
    #[setting(alias = "machine_rank", heading = RUN, default = 0, short = "number of this machine, from 0")]
    pub node_rank: usize,
    /// Address of machine 0, where the ranks meet. Needed with several machines.
    #[setting(alias = "main_process_ip", heading = RUN, default = "127.0.0.1", value_name = "HOST", short = "address of machine 0")]
    pub master_addr: String,
    /// TCP port on machine 0 [default: a free one; 29500 with several machines].
    #[setting(alias = "main_process_port", heading = RUN, most = MOST_PORT, short = "TCP port on machine 0")]
    pub master_port: Option<usize>,
    /// Configuration of `accelerate launch`: a YAML file with the ranks, and settings of sharding and precision for a training command.
    /// A flag wins over the file's ranks.
    #[setting(heading = RUN, value_name = "FILE", short = "configuration of accelerate")]
    pub config_file: Option<PathBuf>,
    /// Number of ranks on all machines, as `accelerate launch` counts them.
    #[setting(hide, heading = RUN, most = MOST_RANKS)]
    pub num_processes: Option<usize>,
}

impl LaunchFlags {
    /// Checks every flag.
    ///
    /// # Errors
    /// A line for each flag that is out of its range or contradicts another one.
    pub fn check(&self) -> Result<()> {
        let ranks = self.nproc_per_node.unwrap_or(1);
        let alone = self.nnodes == 1;
        all([
            at_least_one(name_of!(self.nproc_per_node), ranks),
            at_most::<Self>(name_of!(self.nproc_per_node), ranks),
            at_most::<Self>(name_of!(self.max_restarts), self.max_restarts),
            at_least_one(name_of!(self.nnodes), self.nnodes),
            at_most::<Self>(name_of!(self.nnodes), self.nnodes),
            expect(
                self.node_rank < self.nnodes.max(1),
                name_of!(self.node_rank),
                self.node_rank,
                "a number below nnodes",
            ),
            expect(
                alone || !is_loopback(&self.master_addr),
                name_of!(self.master_addr),
                &self.master_addr,
                "the address of machine 0, as nnodes is above 1",
            ),
            expect(
                self.master_port.is_none_or(|port| (1..=usize::from(u16::MAX)).contains(&port)),
                name_of!(self.master_port),
                self.master_port.unwrap_or(0),
                "a TCP port, 1 to 65535",
            ),
            self.check_num_processes(),
        ])
    }

    fn check_num_processes(&self) -> Result<()> {
        let Some(all_ranks) = self.num_processes else { return Ok(()) };
        let expected = format!("a multiple of nnodes = {}, at least one rank for each machine", self.nnodes);
        let divides = (1..=MOST_RANKS).contains(&(all_ranks as u64)) && all_ranks.is_multiple_of(self.nnodes.max(1));
        expect(divides, name_of!(self.num_processes), all_ranks, &expected)?;
        let contradicts = self.nproc_per_node.is_some_and(|ranks| Some(ranks) != self.local_ranks());
        expect(!contradicts, name_of!(self.num_processes), all_ranks, "no value, as nproc_per_node is set")
    }

    /// Returns the number of ranks on this machine that the flags set.
    pub fn local_ranks(&self) -> Option<usize> {
        self.num_processes.map(|all_ranks| all_ranks / self.nnodes.max(1)).or(self.nproc_per_node)
    }

    /// Returns the port that the flags set; `None` for any free one.
    pub fn port(&self) -> Option<u16> {
        let port = self.master_port.and_then(|port| u16::try_from(port).ok());
        port.or((self.nnodes > 1).then_some(PORT))
    }
}

fn is_loopback(host: &str) -> bool {
    host == "localhost" || host == "::1" || host.starts_with("127.0.0.")
}
