//! The environment that a launcher gives each rank: torchrun's, which `rlhf launch` sets too, and SLURM's (`srun`).
//!
//! Only variables are read here; nothing is connected.

use crate::{Error, Result};
use std::str::FromStr;

/// The place of this process among the ranks, and the address of the store where they meet.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Launch {
    /// Number of this process among all ranks, from 0.
    pub rank: usize,
    /// Number of ranks.
    pub size: usize,
    /// Number of this process among the ranks of its machine, from 0.
    pub local_rank: usize,
    /// Number of ranks on this machine.
    pub local_size: usize,
    /// Host of the store: the machine of rank 0.
    pub host: String,
    /// TCP port of the store.
    pub port: u16,
    /// True if this process serves the store: rank 0, unless torchrun's agent serves it.
    pub serves_store: bool,
    /// True if the launcher serves the store, so that it outlives the ranks; else rank 0 does.
    pub launcher_serves_store: bool,
    /// Number of times that the launcher has started all ranks again.
    pub restart: usize,
    /// Prefix of the keys in the store. It differs between restarts and between the steps of a SLURM job.
    pub key_prefix: String,
}

/// The variable with the process id of `rlhf launch`, in each rank that it starts.
pub const LAUNCHER: &str = "RLHF_LAUNCHER";

/// The variable with the words of the command line of `rlhf launch` up to the command of the ranks, a line each.
pub const LAUNCHED_BY: &str = "RLHF_LAUNCHED_BY";

/// The variables that make a process a rank. A program that a rank starts must not inherit them: it would join the ranks.
pub const VARIABLES: [&str; 9] = [
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "SLURM_STEP_NUM_TASKS",
    "SLURM_STEP_ID",
    "SLURM_STEPID",
    LAUNCHER,
    LAUNCHED_BY,
];

/// Ports of SLURM steps start here. They stay below 32768, where Linux assigns ports by itself.
const FIRST_SLURM_PORT: u64 = 20_000;
/// Number of ports that SLURM steps are spread over.
const SLURM_PORTS: u64 = 12_000;

impl Launch {
    /// Reads the environment of this process; `None` if no launcher started it.
    ///
    /// # Errors
    /// As [`Launch::from_vars`].
    pub fn from_env() -> Result<Option<Self>> {
        Self::from_vars(|name| std::env::var_os(name).map(|value| value.to_string_lossy().into_owned()))
    }

    /// Reads the variables that `var` returns by name; an empty value counts as unset. `None` if no launcher set them.
    ///
    /// - `RANK` and `WORLD_SIZE`, as torchrun and `rlhf launch` set them, with `LOCAL_RANK`, `LOCAL_WORLD_SIZE`, `MASTER_ADDR`
    ///   and `MASTER_PORT`. A world of one rank is a world too. With `TORCHELASTIC_USE_AGENT_STORE=True` torchrun's agent
    ///   serves the store. On a loopback address all ranks are on this machine, so the `LOCAL_` variables may be missing.
    /// - Else SLURM's, in a step (`srun`) of more than one task. The script of `sbatch` is not a step. The store is on the
    ///   first host of the step; its port is 20000 + (7 x job id + step id) mod 12000. `MASTER_ADDR` and `MASTER_PORT`
    ///   replace them.
    ///
    /// # Errors
    /// [`Error::Usage`], in one line, if a variable is missing, is no number or contradicts another one.
    pub fn from_vars(var: impl Fn(&str) -> Option<String>) -> Result<Option<Self>> {
        let vars = Vars(var);
        match (vars.number("RANK", ANY)?, vars.number("WORLD_SIZE", "a whole number, 1 or more")?) {
            (Some(rank), Some(size)) => Self::of_torchrun(&vars, rank, size).map(Some),
            (None, None) => Self::of_slurm(&vars),
            (Some(rank), None) => refuse(format!(
                "RANK = {rank}, but WORLD_SIZE is not set: expected both, as torchrun sets them; unset RANK to start one process"
            )),
            (None, Some(size)) => refuse(format!(
                "WORLD_SIZE = {size}, but RANK is not set: expected both, as torchrun sets them; unset WORLD_SIZE to start one process"
            )),
        }
    }

    fn of_torchrun(vars: &Vars<impl Fn(&str) -> Option<String>>, rank: usize, size: usize) -> Result<Self> {
        let host = vars.needed("MASTER_ADDR", "the host of rank 0")?;
        let port = vars.needed_number("MASTER_PORT", "a TCP port, 1 to 65535")?;
        let on_this_machine = host == "localhost" || host == "::1" || host.starts_with("127.");
        let local_rank = match vars.number("LOCAL_RANK", ANY)? {
            Some(local_rank) => local_rank,
            None if on_this_machine => rank,
            None => vars.needed_number("LOCAL_RANK", "the rank among those of this machine, from 0")?,
        };
        // DeepSpeed's launcher sets LOCAL_SIZE.
        let local_size = match (vars.number("LOCAL_WORLD_SIZE", ANY)?, vars.number("LOCAL_SIZE", ANY)?) {
            (Some(local_size), _) | (None, Some(local_size)) => local_size,
            (None, None) if on_this_machine => size,
            (None, None) => vars.needed_number("LOCAL_WORLD_SIZE", "the number of ranks on this machine")?,
        };
        check_below("RANK", rank, "WORLD_SIZE", size)?;
        check_below("LOCAL_RANK", local_rank, "LOCAL_WORLD_SIZE", local_size)?;
        if local_size > size {
            return refuse(format!("LOCAL_WORLD_SIZE = {local_size}: expected at most WORLD_SIZE, which is {size}"));
        }
        let agent = vars.get("TORCHELASTIC_USE_AGENT_STORE").is_some_and(|value| value == "True");
        let restart = vars.number("TORCHELASTIC_RESTART_COUNT", ANY)?.unwrap_or(0);
        let run = vars.get("TORCHELASTIC_RUN_ID").unwrap_or_else(|| "none".into());
        Ok(Self {
            rank,
            size,
            local_rank,
            local_size,
            host,
            port,
            serves_store: rank == 0 && !agent,
            launcher_serves_store: agent,
            restart,
            key_prefix: format!("rlhf/{run}/{restart}"),
        })
    }

    fn of_slurm(vars: &Vars<impl Fn(&str) -> Option<String>>) -> Result<Option<Self>> {
        let size = match vars.number("SLURM_STEP_NUM_TASKS", ANY)? {
            // Only a step has one of these; the script of `sbatch` has SLURM_NTASKS and SLURM_PROCID alone.
            None if vars.get("SLURM_STEP_ID").or(vars.get("SLURM_STEPID")).is_some() => {
                vars.number("SLURM_NTASKS", ANY)?
            }
            size => size,
        };
        let Some(size) = size.filter(|&size: &usize| size > 1) else { return Ok(None) };
        let rank = vars.needed_number("SLURM_PROCID", "the rank of this task")?;
        let local_rank = vars.needed_number("SLURM_LOCALID", "the rank of this task on its node")?;
        check_below("SLURM_PROCID", rank, "the number of tasks", size)?;
        let local_size = slurm_local_size(vars)?;
        check_below("SLURM_LOCALID", local_rank, "the number of tasks of the node", local_size)?;
        let job: u64 = vars.first_number(&["SLURM_JOB_ID", "SLURM_JOBID"])?.unwrap_or(0);
        let step: u64 = vars.first_number(&["SLURM_STEP_ID", "SLURM_STEPID"])?.unwrap_or(0);
        let host = match vars.get("MASTER_ADDR") {
            Some(host) => host,
            None => slurm_host(vars)?,
        };
        let port = FIRST_SLURM_PORT + job.wrapping_mul(7).wrapping_add(step) % SLURM_PORTS;
        let port = vars.number("MASTER_PORT", "a TCP port, 1 to 65535")?.unwrap_or(port as u16);
        let restart = vars.number("SLURM_RESTART_COUNT", ANY)?.unwrap_or(0);
        Ok(Some(Self {
            rank,
            size,
            local_rank,
            local_size,
            host,
            port,
            serves_store: rank == 0,
            launcher_serves_store: false,
            restart,
            key_prefix: format!("rlhf/{job}.{step}/{restart}"),
        }))
    }
}

/// Returns the number of tasks of the step on this node.
fn slurm_local_size(vars: &Vars<impl Fn(&str) -> Option<String>>) -> Result<usize> {
    let node = vars.number("SLURM_NODEID", ANY)?.unwrap_or(0);
    for name in ["SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE"] {
        let Some(list) = vars.get(name) else { continue };
        // One number is that of each node.
        let single = list.parse().ok().filter(|&tasks: &usize| tasks > 0);
        return match single.or_else(|| tasks_of_node(&list, node)) {
            Some(tasks) => Ok(tasks),
            None => refuse(format!(
                "{name} = {list}: expected the tasks of each node, such as 4(x2),3, with an entry for SLURM_NODEID = {node}"
            )),
        };
    }
    refuse(
        "SLURM_STEP_TASKS_PER_NODE is not set: expected the tasks of each node, such as 4(x2),3, as srun sets it"
            .into(),
    )
}

/// Returns the entry for node `node`, from 0, of a list such as `4(x2),3`: `Some(3)` for node 2.
fn tasks_of_node(list: &str, node: usize) -> Option<usize> {
    let mut before = 0usize;
    for entry in list.split(',') {
        let (tasks, nodes) = match entry.split_once("(x") {
            Some((tasks, nodes)) => (tasks, nodes.strip_suffix(')')?.parse().ok()?),
            None => (entry, 1usize),
        };
        before = before.checked_add(nodes)?;
        if node < before {
            return tasks.trim().parse().ok().filter(|&tasks| tasks > 0);
        }
    }
    None
}

/// Returns the first host of the step.
fn slurm_host(vars: &Vars<impl Fn(&str) -> Option<String>>) -> Result<String> {
    for name in ["SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"] {
        let Some(list) = vars.get(name) else { continue };
        return match first_host(&list) {
            Some(host) => Ok(host),
            None => refuse(format!(
                "{name} = {list}: expected a list of hosts such as gpu[003-005,9],x1; MASTER_ADDR sets rank 0's host too"
            )),
        };
    }
    refuse("SLURM_STEP_NODELIST is not set: expected the hosts of the step, as srun sets it; MASTER_ADDR sets rank 0's host too".into())
}

/// Returns the first host of SLURM's list: `gpu003` of `gpu[003-005,9],x1`.
fn first_host(list: &str) -> Option<String> {
    let mut host = String::new();
    let mut rest = list.trim();
    loop {
        let end = rest.find(['[', ',']).unwrap_or(rest.len());
        host.push_str(&rest[..end]);
        if !rest[end..].starts_with('[') {
            let valid = !host.is_empty() && !host.contains(|c: char| c == ']' || c.is_whitespace());
            return valid.then_some(host);
        }
        let (numbers, after) = rest[end + 1..].split_once(']')?;
        let first = numbers.split([',', '-']).next().unwrap_or_default();
        if first.is_empty() || !first.bytes().all(|byte| byte.is_ascii_digit()) {
            return None;
        }
        host.push_str(first);
        rest = after;
    }
}

/// Description of a count, for errors.
const ANY: &str = "a whole number, 0 or more";

/// Variables by name.
struct Vars<F>(F);

impl<F: Fn(&str) -> Option<String>> Vars<F> {
    fn get(&self, name: &str) -> Option<String> {
        (self.0)(name).map(|value| value.trim().to_string()).filter(|value| !value.is_empty())
    }

    fn number<T: FromStr>(&self, name: &str, expected: &str) -> Result<Option<T>> {
        let Some(text) = self.get(name) else { return Ok(None) };
        match text.parse() {
            Ok(number) => Ok(Some(number)),
            Err(_) => refuse(format!("{name} = {text}: expected {expected}; launchers of ranks set this variable")),
        }
    }

    /// Returns the number of the first of these variables that is set.
    fn first_number<T: FromStr>(&self, names: &[&str]) -> Result<Option<T>> {
        match names.iter().find(|name| self.get(name).is_some()) {
            Some(name) => self.number(name, ANY),
            None => Ok(None),
        }
    }

    fn needed(&self, name: &str, expected: &str) -> Result<String> {
        match self.get(name) {
            Some(value) => Ok(value),
            None => refuse(format!(
                "{name} is not set: expected {expected}; torchrun, srun and `rlhf launch` set such variables, and one process needs none"
            )),
        }
    }

    fn needed_number<T: FromStr>(&self, name: &str, expected: &str) -> Result<T> {
        self.needed(name, expected)?;
        Ok(self.number(name, expected)?.expect("it is set"))
    }
}

fn check_below(name: &str, found: usize, bound: &str, size: usize) -> Result<()> {
    if found < size {
        return Ok(());
    }
    refuse(format!("{name} = {found}: expected a number below {bound}, which is {size}"))
}

fn refuse<T>(message: String) -> Result<T> {
    Err(Error::Usage(message))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Reads `NAME=VALUE` words as the environment.
    fn read(words: &str) -> Result<Option<Launch>> {
        let vars: Vec<(&str, &str)> = words.split_whitespace().filter_map(|word| word.split_once('=')).collect();
        Launch::from_vars(|name| vars.iter().find(|(known, _)| *known == name).map(|(_, value)| value.to_string()))
    }

    const TORCHRUN: &str = "MASTER_ADDR=node7 MASTER_PORT=29500 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2";

    #[test]
    fn without_a_launcher_there_are_no_ranks() {
        assert_eq!(read("").unwrap(), None);
        assert_eq!(read("RANK= WORLD_SIZE= MASTER_ADDR=node7 MASTER_PORT=x LOCAL_RANK=3").unwrap(), None);
    }

    #[test]
    fn the_variables_of_torchrun_are_read() {
        let launch = read(&format!("RANK=3 WORLD_SIZE=4 {TORCHRUN}")).unwrap().unwrap();
        let expected = Launch {
            rank: 3,
            size: 4,
            local_rank: 1,
            local_size: 2,
            host: "node7".into(),
            port: 29500,
            serves_store: false,
            launcher_serves_store: false,
            restart: 0,
            key_prefix: "rlhf/none/0".into(),
        };
        assert_eq!(launch, expected);
        let elastic = "TORCHELASTIC_RESTART_COUNT=2 TORCHELASTIC_RUN_ID=17";
        for (agent, serves_store) in [("True", false), ("False", true)] {
            let words = format!("RANK=0 WORLD_SIZE=2 {TORCHRUN} {elastic} TORCHELASTIC_USE_AGENT_STORE={agent}");
            let launch = read(&words).unwrap().unwrap();
            assert_eq!((launch.serves_store, launch.restart), (serves_store, 2));
            assert_eq!(launch.key_prefix, "rlhf/17/2");
        }
        let alone = "RANK=0 WORLD_SIZE=1 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 MASTER_ADDR=::1 MASTER_PORT=1";
        let alone = read(alone).unwrap().unwrap();
        assert_eq!((alone.size, alone.serves_store), (1, true));
    }

    #[test]
    fn ranks_that_meet_on_the_loopback_address_share_this_machine() {
        for host in ["127.0.0.1", "localhost", "::1"] {
            let launch = read(&format!("RANK=1 WORLD_SIZE=3 MASTER_ADDR={host} MASTER_PORT=29500")).unwrap().unwrap();
            assert_eq!((launch.local_rank, launch.local_size), (1, 3));
        }
        // DeepSpeed's launcher.
        let words = "RANK=9 WORLD_SIZE=16 LOCAL_RANK=1 LOCAL_SIZE=8 MASTER_ADDR=node0 MASTER_PORT=29500";
        let launch = read(words).unwrap().unwrap();
        assert_eq!((launch.local_rank, launch.local_size), (1, 8));
    }

    #[test]
    fn contradictions_are_refused_in_one_line_that_names_the_variable() {
        for (words, part) in [
            ("WORLD_SIZE=4", "WORLD_SIZE = 4, but RANK is not set: expected both"),
            ("RANK=0", "RANK = 0, but WORLD_SIZE is not set: expected both"),
            ("RANK=x WORLD_SIZE=4", "RANK = x: expected a whole number, 0 or more"),
            ("RANK=0 WORLD_SIZE=-1", "WORLD_SIZE = -1: expected a whole number, 1 or more"),
            ("RANK=0 WORLD_SIZE=2", "MASTER_ADDR is not set: expected the host of rank 0"),
            ("RANK=0 WORLD_SIZE=2 MASTER_ADDR=a", "MASTER_PORT is not set: expected a TCP port"),
            ("RANK=0 WORLD_SIZE=2 MASTER_ADDR=a MASTER_PORT=70000", "MASTER_PORT = 70000: expected a TCP port"),
            ("RANK=0 WORLD_SIZE=2 MASTER_ADDR=a MASTER_PORT=1", "LOCAL_RANK is not set"),
            ("RANK=0 WORLD_SIZE=2 MASTER_ADDR=a MASTER_PORT=1 LOCAL_RANK=0", "LOCAL_WORLD_SIZE is not set"),
            (
                "RANK=4 WORLD_SIZE=4 MASTER_ADDR=::1 MASTER_PORT=1",
                "RANK = 4: expected a number below WORLD_SIZE, which is 4",
            ),
            ("RANK=0 WORLD_SIZE=0 MASTER_ADDR=::1 MASTER_PORT=1", "RANK = 0: expected a number below WORLD_SIZE"),
            (
                "RANK=0 WORLD_SIZE=2 MASTER_ADDR=a MASTER_PORT=1 LOCAL_RANK=2 LOCAL_WORLD_SIZE=2",
                "LOCAL_RANK = 2: expected",
            ),
            (
                "RANK=0 WORLD_SIZE=2 MASTER_ADDR=a MASTER_PORT=1 LOCAL_RANK=2 LOCAL_WORLD_SIZE=3",
                "LOCAL_WORLD_SIZE = 3: expected at most",
            ),
            (
                "RANK=0 WORLD_SIZE=2 MASTER_ADDR=::1 MASTER_PORT=1 TORCHELASTIC_RESTART_COUNT=a",
                "TORCHELASTIC_RESTART_COUNT = a",
            ),
            ("SLURM_STEP_NUM_TASKS=2", "SLURM_PROCID is not set"),
            ("SLURM_STEP_NUM_TASKS=2 SLURM_PROCID=2 SLURM_LOCALID=0", "SLURM_PROCID = 2: expected a number below"),
            ("SLURM_STEP_NUM_TASKS=2 SLURM_PROCID=1 SLURM_LOCALID=0", "SLURM_STEP_TASKS_PER_NODE is not set"),
            (
                "SLURM_STEP_NUM_TASKS=2 SLURM_PROCID=1 SLURM_LOCALID=0 SLURM_NODEID=1 SLURM_STEP_TASKS_PER_NODE=2(x1)",
                "with an entry for SLURM_NODEID = 1",
            ),
            (
                "SLURM_STEP_NUM_TASKS=2 SLURM_PROCID=1 SLURM_LOCALID=0 SLURM_STEP_TASKS_PER_NODE=2 SLURM_NODELIST=a[",
                "SLURM_NODELIST = a[: expected a list of hosts",
            ),
        ] {
            let error = read(words).expect_err(words);
            assert!(matches!(error, Error::Usage(_)), "{words}");
            let line = error.to_string();
            assert!(line.contains(part) && !line.contains('\n'), "{words}: {line}");
        }
    }

    #[test]
    fn a_program_without_the_variables_of_ranks_is_one_process() {
        let torchrun = format!("RANK=3 WORLD_SIZE=4 {TORCHRUN}");
        let step = format!("{SRUN} SLURM_STEPID=3 SLURM_PROCID=9 SLURM_LOCALID=1 SLURM_NODEID=2");
        for vars in [torchrun, step] {
            assert!(read(&vars).unwrap().is_some(), "{vars}");
            let is_variable = |word: &&str| word.split_once('=').is_some_and(|(name, _)| VARIABLES.contains(&name));
            let left: Vec<&str> = vars.split_whitespace().filter(|word| !is_variable(word)).collect();
            assert_eq!(read(&left.join(" ")).unwrap(), None, "{left:?}");
        }
    }

    const SRUN: &str = "SLURM_JOB_ID=1234567 SLURM_STEP_ID=3 SLURM_STEP_NUM_TASKS=11 SLURM_NTASKS=11 \
                        SLURM_STEP_TASKS_PER_NODE=4(x2),3 SLURM_STEP_NODELIST=gpu[003-005]";

    #[test]
    fn the_variables_of_a_slurm_step_are_read() {
        let launch = read(&format!("{SRUN} SLURM_PROCID=9 SLURM_LOCALID=1 SLURM_NODEID=2")).unwrap().unwrap();
        let expected = Launch {
            rank: 9,
            size: 11,
            local_rank: 1,
            local_size: 3,
            host: "gpu003".into(),
            // 20000 + (7 * 1234567 + 3) % 12000
            port: 21972,
            serves_store: false,
            launcher_serves_store: false,
            restart: 0,
            key_prefix: "rlhf/1234567.3/0".into(),
        };
        assert_eq!(launch, expected);
        let step =
            "SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NODEID=0 SLURM_RESTART_COUNT=1 MASTER_ADDR=ib0 MASTER_PORT=5000";
        let launch = read(&format!("{SRUN} {step}")).unwrap().unwrap();
        assert_eq!((launch.host.as_str(), launch.port, launch.serves_store, launch.local_size), ("ib0", 5000, true, 4));
        assert_eq!(launch.key_prefix, "rlhf/1234567.3/1");
        // torchrun in a step: one task per node, and torchrun's own ranks.
        let launch = read(&format!("{SRUN} {step} RANK=1 WORLD_SIZE=4 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2"));
        assert_eq!(launch.unwrap().unwrap().size, 4);
    }

    #[test]
    fn a_batch_script_and_a_step_of_one_task_are_one_process() {
        let job =
            "SLURM_JOB_ID=12 SLURM_NTASKS=8 SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_TASKS_PER_NODE=8 SLURM_NODELIST=a";
        assert_eq!(read(job).unwrap(), None);
        assert_eq!(read(&format!("{job} SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=1")).unwrap(), None);
        let step = read(&format!("{job} SLURM_STEPID=0")).unwrap().unwrap();
        assert_eq!((step.size, step.local_size, step.host.as_str()), (8, 8, "a"));
    }

    #[test]
    fn lists_of_slurm_are_parsed() {
        for (list, host) in [
            ("x1", Some("x1")),
            ("x1,x2", Some("x1")),
            ("gpu[003-005,9],x1", Some("gpu003")),
            ("gpu[9,003-005].cluster.org", Some("gpu9.cluster.org")),
            ("rack[1-2]n[07-12]-ib", Some("rack1n07-ib")),
            ("", None),
            (",x1", None),
            ("gpu[", None),
            ("gpu[]", None),
            ("gpu[a-b]", None),
            ("gpu]", None),
        ] {
            assert_eq!(first_host(list).as_deref(), host, "{list}");
        }
        for (list, node, tasks) in [
            ("4(x2),3", 0, Some(4)),
            ("4(x2),3", 1, Some(4)),
            ("4(x2),3", 2, Some(3)),
            ("4(x2),3", 3, None),
            ("0", 0, None),
            ("4(x", 0, None),
            ("4(x18446744073709551615),1,1", 1, Some(4)),
            ("", 0, None),
        ] {
            assert_eq!(tasks_of_node(list, node), tasks, "{list}, node {node}");
        }
    }
}
