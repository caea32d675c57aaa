//! Ranks of a distributed run and their collectives, on torch's c10d.
//!
//! Every rank runs the same program on the same settings. Batches, experience and metrics are the same on all ranks; generation,
//! scoring, forward and backward passes are divided by rows, and their results are gathered or summed through [`World`]. With one
//! rank every operation returns its argument.
//!
//! Collectives must be called by all ranks in the same order. The first failure breaks the world: the error names the rank that
//! caused it, and every later collective returns it at once.

mod failure;
pub mod launch;
mod passes;
mod settings;

pub use passes::Sharded;
pub use settings::{DistConfig, PpoDistConfig, ZeroStage};

use crate::{Error, Result, process};
use failure::{Agreed, Failure, Fault};
use launch::Launch;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};
use std::cell::Cell;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, MutexGuard, Once, OnceLock};
use std::time::{Duration, Instant};
use tch::{Device, Kind, Tensor};
use tch_ext::{Group, Pending, Reduce, Rendezvous};

/// Time within which all ranks of a run must start.
const MEETING: Duration = Duration::from_secs(60);

/// Time within which all ranks must start again after a failure: another machine's may still save a checkpoint.
const MEETING_AGAIN: Duration = Duration::from_secs(600);

/// Tensors below this size are not preceded by a barrier that measures the time of waiting, in bytes.
const MEASURED_BYTES: usize = 1 << 16;

/// The ranks that train together, and which of them this process is.
#[derive(Debug, Clone, Default)]
pub struct World {
    ranks: Option<Arc<Ranks>>,
    /// Whether collectives are those of a pass through a sharded model.
    inside_pass: bool,
}

/// The ranks of a world with a process group.
#[derive(Debug)]
struct Ranks {
    rank: usize,
    size: usize,
    local_rank: usize,
    timeout: Duration,
    /// Whether rank 0 serves the store, rather than a launcher.
    rank_0_serves: bool,
    /// Gloo, for tensors on the CPU.
    group: Mutex<Group>,
    /// NCCL, for tensors on a GPU.
    gpu_group: OnceLock<Mutex<Group>>,
    failure: Mutex<Option<Failure>>,
    /// The wait of the rank that serves the store for those that read its error.
    readers: Once,
    /// Whether the store does not respond, so that a request to it would not return.
    store_hangs: AtomicBool,
    /// The error that the ranks have agreed on last.
    agreed: Mutex<Option<Agreed>>,
    times: Mutex<Times>,
    /// Models whose passes contain collectives.
    models: passes::Models,
    fault: Option<Fault>,
}

/// Time of the collectives since [`World::take_times`] was last called, in seconds, and the bytes of their results.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Times {
    /// Waiting for other ranks before a collective.
    pub waiting: f64,
    /// Communication. Of a collective in progress ([`Work`]) it is the time of [`Work::wait`], with the wait for other ranks in it.
    pub collectives: f64,
    /// Bytes of the results.
    pub bytes: f64,
}

/// A collective in progress, c10d's `Work`. Until it is waited for, its tensors are neither written to nor freed, and those that it fills
/// are not read. All ranks start their collectives in the same order; each waits where it needs the result.
///
/// Dropping waits too, and leaves an error to the next collective.
#[derive(Debug)]
#[must_use = "the result is there after `wait`"]
pub struct Work {
    world: World,
    /// `None` in a world of one process, where the result is there at once.
    pending: Option<Pending<'static>>,
}

impl Work {
    /// Waits for the result: on a GPU, makes the current stream wait for it.
    ///
    /// # Errors
    /// As [`World::sum`].
    pub fn wait(self) -> Result<()> {
        let (Some(ranks), Some(pending)) = (&self.world.ranks, self.pending) else { return Ok(()) };
        let began = Instant::now();
        let done = pending.wait();
        lock(&ranks.times).collectives += began.elapsed().as_secs_f64();
        done.map_err(|e| self.world.fail(&e))
    }
}

/// The world of this process, once it has joined one.
static OF_PROCESS: OnceLock<World> = OnceLock::new();

thread_local! {
    /// The number of ranks that [`as_ranks`] sets.
    static SUPPOSED: Cell<Option<usize>> = const { Cell::new(None) };
}

/// Calls `f`, during which [`num_ranks`] is `size` on this thread: a launcher checks the settings of the ranks that it will start.
pub fn as_ranks<T>(size: usize, f: impl FnOnce() -> T) -> T {
    let before = SUPPOSED.replace(Some(size));
    let result = f();
    SUPPOSED.set(before);
    result
}

/// Returns the number of ranks of the run: those that this process has joined, and before that those that its launcher started.
pub fn num_ranks() -> usize {
    match SUPPOSED.get().or(OF_PROCESS.get().map(World::size)) {
        Some(size) => size,
        // An environment that contradicts itself is refused where the ranks meet.
        None => Launch::from_env().ok().flatten().map_or(1, |launch| launch.size),
    }
}

impl World {
    /// One process that trains alone.
    pub fn single() -> Self {
        Self::default()
    }

    /// The ranks of this process: those of [`World::join`], otherwise itself alone.
    pub fn of_process() -> Self {
        OF_PROCESS.get().cloned().unwrap_or_default()
    }

    /// Meets the other ranks of `launch`, and makes the group the world of this process: torch's `init_process_group`. A collective
    /// may take `timeout`.
    ///
    /// Each rank announces itself in the store, so that one that does not come within a minute is named. After a restart it is ten
    /// minutes, as rank 0 of another machine may still save a checkpoint.
    ///
    /// # Errors
    /// If a rank does not come, the store cannot be reached, or this process has joined a world already.
    pub fn join(launch: &Launch, timeout: Duration) -> Result<Self> {
        if OF_PROCESS.get().is_some() {
            return Err(Error::Usage("World::join: this process has joined its ranks already".into()));
        }
        let world = Self::connect(launch, timeout)?;
        let _ = OF_PROCESS.set(world.clone());
        Ok(world)
    }

    /// Meets the other ranks of `launch`, as [`World::join`] does.
    fn connect(launch: &Launch, timeout: Duration) -> Result<Self> {
        let rendezvous = &Rendezvous {
            host: launch.host.clone(),
            port: launch.port,
            serves: launch.serves_store,
            prefix: launch.key_prefix.clone(),
            rank: launch.rank,
            size: launch.size,
            patience: if launch.restart > 0 { MEETING_AGAIN } else { MEETING }.min(timeout),
            timeout,
        };
        let store = failure::meet(rendezvous)?;
        let connected = Group::connect(store, launch.rank, launch.size, timeout);
        let group = connected
            .map_err(|e| Error::Run(format!("rank {}: cannot connect to the other ranks: {e}", launch.rank)))?;
        let ranks = Ranks {
            rank: launch.rank,
            size: launch.size,
            local_rank: launch.local_rank,
            timeout,
            rank_0_serves: !launch.launcher_serves_store,
            group: Mutex::new(group),
            gpu_group: OnceLock::new(),
            failure: Mutex::new(None),
            readers: Once::new(),
            store_hangs: AtomicBool::new(false),
            agreed: Mutex::default(),
            times: Mutex::default(),
            models: passes::Models::default(),
            fault: Fault::of_rank(launch.rank),
        };
        Ok(Self { ranks: Some(Arc::new(ranks)), inside_pass: false })
    }

    /// Number of this process, from 0.
    pub fn rank(&self) -> usize {
        self.ranks.as_ref().map_or(0, |ranks| ranks.rank)
    }

    /// Number of ranks.
    pub fn size(&self) -> usize {
        self.ranks.as_ref().map_or(1, |ranks| ranks.size)
    }

    /// Number of this process among those of its machine, from 0.
    pub fn local_rank(&self) -> usize {
        self.ranks.as_ref().map_or(0, |ranks| ranks.local_rank)
    }

    /// Whether this rank writes files and prints.
    pub fn is_main(&self) -> bool {
        self.rank() == 0
    }

    /// This rank's part of `rows` rows: contiguous parts in the order of ranks, whose sizes differ by at most one.
    pub fn share(&self, rows: usize) -> Range<usize> {
        share(rows, self.rank(), self.size())
    }

    /// The parts of all ranks of rows with these weights, such as their numbers of tokens: contiguous, in the order of ranks, of
    /// about the same total weight. A part may be empty.
    pub fn shares_by(&self, weights: &[usize]) -> Vec<Range<usize>> {
        shares_by(weights, self.size())
    }

    /// The places of this rank's part of `rows`, of which all ranks' parts have about as many `tokens`.
    pub fn own_part<T>(&self, rows: &[T], tokens: impl Fn(&T) -> usize) -> Range<usize> {
        if self.ranks.is_none() {
            return 0..rows.len();
        }
        let weights: Vec<usize> = rows.iter().map(tokens).collect();
        self.shares_by(&weights)[self.rank()].clone()
    }

    /// This rank's part of `rows`, as [`World::own_part`].
    pub fn share_by<'a, T>(&self, rows: &'a [T], tokens: impl Fn(&T) -> usize) -> &'a [T] {
        &rows[self.own_part(rows, tokens)]
    }

    /// Replaces `x` by its sum over all ranks; all ranks get the same bits.
    ///
    /// # Errors
    /// If a rank has ended or does not respond.
    pub fn sum(&self, x: &mut Tensor) -> Result<()> {
        self.all_reduce(x, Reduce::Sum)
    }

    /// Replaces `x` by its maximum over all ranks, elementwise.
    ///
    /// # Errors
    /// As [`World::sum`].
    pub fn max(&self, x: &mut Tensor) -> Result<()> {
        self.all_reduce(x, Reduce::Max)
    }

    /// Sums of host numbers over all ranks, elementwise and in place.
    ///
    /// # Errors
    /// As [`World::sum`].
    pub fn sum_numbers(&self, numbers: &mut [f64]) -> Result<()> {
        if self.ranks.is_none() || numbers.is_empty() {
            return Ok(());
        }
        let mut sums = Tensor::from_slice(numbers);
        self.sum(&mut sums)?;
        numbers.copy_from_slice(&Vec::<f64>::try_from(sums)?);
        Ok(())
    }

    /// The largest of all ranks' numbers.
    ///
    /// # Errors
    /// As [`World::sum`].
    pub fn max_number(&self, sent: f64) -> Result<f64> {
        let mut x = Tensor::from_slice(&[sent]);
        self.max(&mut x)?;
        Ok(x.double_value(&[0]))
    }

    /// The smallest of all ranks' counts.
    ///
    /// # Errors
    /// As [`World::sum`].
    pub fn min_count(&self, sent: usize) -> Result<usize> {
        Ok(if self.ranks.is_none() { sent } else { (-self.max_number(-(sent as f64))?) as usize })
    }

    /// Whether a condition holds on any rank; the same result on every rank.
    ///
    /// # Errors
    /// As [`World::sum`].
    pub fn any(&self, condition: bool) -> Result<bool> {
        Ok(if self.ranks.is_none() { condition } else { self.max_number(f64::from(u8::from(condition)))? > 0.0 })
    }

    /// Whether a condition holds on all ranks; the same result on every rank.
    ///
    /// # Errors
    /// As [`World::sum`].
    pub fn all(&self, condition: bool) -> Result<bool> {
        Ok(!self.any(!condition)?)
    }

    /// Rows of all ranks, in the order of ranks: `sent` are this rank's rows, `counts` the numbers of rows of all ranks.
    ///
    /// # Errors
    /// As [`World::sum`].
    pub fn gather_rows(&self, sent: &Tensor, counts: &[usize]) -> Result<Tensor> {
        if self.ranks.is_none() {
            return Ok(sent.shallow_clone());
        }
        let max_rows = counts.iter().copied().max().unwrap_or(0) as i64;
        let mut shape = sent.size();
        shape[0] = max_rows;
        let part = Tensor::zeros(shape.as_slice(), (sent.kind(), sent.device()));
        part.narrow(0, 0, sent.size()[0]).copy_(sent);
        shape[0] = max_rows * counts.len() as i64;
        let mut all = Tensor::zeros(shape.as_slice(), (sent.kind(), sent.device()));
        self.all_gather(&mut all, &part)?;
        let rows = counts.iter().enumerate().map(|(rank, &rows)| all.narrow(0, rank as i64 * max_rows, rows as i64));
        Ok(Tensor::cat(&rows.collect::<Vec<_>>(), 0))
    }

    /// The values of all ranks, in the order of ranks. They are sent as JSON, which keeps the bits of finite numbers and has no others.
    ///
    /// # Errors
    /// As [`World::sum`]; if a value cannot be sent.
    pub fn gather<T: Serialize + DeserializeOwned>(&self, sent: T) -> Result<Vec<T>> {
        if self.size() == 1 {
            return Ok(vec![sent]);
        }
        let all = self.gather_bytes(&self.to_json(&sent)?)?;
        all.iter().enumerate().map(|(rank, bytes)| from_json(rank, bytes)).collect()
    }

    /// The bytes of all ranks, in the order of ranks.
    fn gather_bytes(&self, sent: &[u8]) -> Result<Vec<Vec<u8>>> {
        if self.ranks.is_none() {
            return Ok(vec![sent.to_vec()]);
        }
        let len = Tensor::from_slice(&[sent.len() as i64]);
        let mut lens = Tensor::zeros([self.size() as i64], (Kind::Int64, Device::Cpu));
        self.all_gather(&mut lens, &len)?;
        let lens: Vec<usize> = Vec::<i64>::try_from(lens)?.into_iter().map(|len| len as usize).collect();
        let all = self.gather_rows(&Tensor::from_slice(sent), &lens)?;
        let all = Vec::<u8>::try_from(all)?;
        let mut rest = all.as_slice();
        Ok(lens.iter().map(|&len| rest.split_off(..len).unwrap_or_default().to_vec()).collect())
    }

    /// The numbers of all ranks, in the order of ranks.
    ///
    /// # Errors
    /// As [`World::sum`].
    pub fn gather_numbers(&self, sent: &[f64]) -> Result<Vec<Vec<f64>>> {
        let bytes: Vec<u8> = sent.iter().flat_map(|number| number.to_le_bytes()).collect();
        let number = |bytes: &[u8]| f64::from_le_bytes(bytes.try_into().unwrap_or_default());
        let numbers = |bytes: Vec<u8>| bytes.chunks_exact(8).map(number).collect();
        Ok(self.gather_bytes(&bytes)?.into_iter().map(numbers).collect())
    }

    /// The value `sent` of rank 0, on every rank; sent as by [`World::gather`].
    ///
    /// # Errors
    /// As [`World::gather`].
    pub fn broadcast<T: Serialize + DeserializeOwned>(&self, sent: T) -> Result<T> {
        if self.size() == 1 {
            return Ok(sent);
        }
        let bytes = self.is_main().then(|| self.to_json(&sent)).transpose()?;
        let bytes = self.broadcast_bytes(bytes)?;
        if self.is_main() { Ok(sent) } else { from_json(0, &bytes) }
    }

    /// The bytes of rank 0, which passes `Some`.
    ///
    /// # Errors
    /// As [`World::sum`].
    pub fn broadcast_bytes(&self, bytes: Option<Vec<u8>>) -> Result<Vec<u8>> {
        let sent = bytes.filter(|_| self.is_main()).unwrap_or_default();
        if self.ranks.is_none() {
            return Ok(sent);
        }
        let len = self.max_number(sent.len() as f64)? as usize;
        let mut x = if self.is_main() {
            Tensor::from_slice(&sent)
        } else {
            Tensor::zeros([len as i64], (Kind::Uint8, Device::Cpu))
        };
        if len > 0 {
            self.broadcast_tensor(&mut x)?;
        }
        Ok(Vec::try_from(x)?)
    }

    /// The numbers of rank 0, in place: decisions that follow from them are then the same on ranks whose processors round
    /// differently.
    ///
    /// # Errors
    /// As [`World::sum`].
    pub fn broadcast_numbers(&self, numbers: &mut [f64]) -> Result<()> {
        if self.ranks.is_none() || numbers.is_empty() {
            return Ok(());
        }
        let mut x = Tensor::from_slice(numbers);
        self.broadcast_tensor(&mut x)?;
        numbers.copy_from_slice(&Vec::<f64>::try_from(x)?);
        Ok(())
    }

    /// Replaces `x` by that of rank 0.
    fn broadcast_tensor(&self, x: &mut Tensor) -> Result<()> {
        let size = Size::of(x);
        self.collective(size, |group| Ok(group.broadcast(x, 0)?.unborrowed()))
    }

    /// Fills `whole` with the parts of all ranks, in the order of ranks.
    ///
    /// # Errors
    /// As [`World::sum`]; if `whole` is not `size` times `part`.
    pub fn all_gather(&self, whole: &mut Tensor, part: &Tensor) -> Result<()> {
        if self.ranks.is_none() {
            whole.copy_(part);
            return Ok(());
        }
        let size = Size::of(whole);
        self.collective(size, |group| Ok(group.all_gather(whole, part)?.unborrowed()))
    }

    /// Fills `part` with this rank's part of the sum of all ranks' `whole`, which is cut into equal parts by rank.
    ///
    /// # Errors
    /// As [`World::sum`]; if `whole` is not `size` times `part`.
    pub fn reduce_scatter(&self, part: &mut Tensor, whole: &Tensor) -> Result<()> {
        if self.ranks.is_none() {
            part.copy_(whole);
            return Ok(());
        }
        self.collective(Size::of(whole), |group| Ok(group.reduce_scatter(part, whole)?.unborrowed()))
    }

    /// Starts [`World::all_gather`], without a wait for the other ranks.
    ///
    /// # Errors
    /// As [`World::all_gather`].
    pub fn start_all_gather(&self, whole: &Tensor, part: &Tensor) -> Result<Work> {
        let mut whole = whole.shallow_clone();
        if self.ranks.is_none() {
            whole.copy_(part);
        }
        self.start(Size::of(&whole), |group| Ok(group.all_gather(&mut whole, part)?.unborrowed()))
    }

    /// Starts [`World::reduce_scatter`], without a wait for the other ranks.
    ///
    /// # Errors
    /// As [`World::reduce_scatter`].
    pub fn start_reduce_scatter(&self, part: &Tensor, whole: &Tensor) -> Result<Work> {
        let mut part = part.shallow_clone();
        if self.ranks.is_none() {
            part.copy_(whole);
        }
        self.start(Size::of(whole), |group| Ok(group.reduce_scatter(&mut part, whole)?.unborrowed()))
    }

    /// Waits for all ranks.
    ///
    /// # Errors
    /// As [`World::sum`].
    pub fn barrier(&self) -> Result<()> {
        self.any(false).map(drop)
    }

    /// Makes an error of one rank an error of all: returns this rank's result if all ranks succeeded. Otherwise each rank returns
    /// its own error, or that of the first rank that has one; the message names the rank, unless all ranks have the same. Ranks that
    /// agree on an error are still in step and can write a checkpoint together.
    ///
    /// # Errors
    /// See above; if a rank has ended or does not respond.
    pub fn agree<T>(&self, result: Result<T>) -> Result<T> {
        let Some(ranks) = self.ranks.as_ref().filter(|ranks| ranks.size > 1) else { return result };
        let sent = result.as_ref().err().map(failure::to_bytes).unwrap_or_default();
        let errors = match self.check().and_then(|()| self.gather_bytes(&sent)) {
            Ok(errors) => errors,
            Err(broken) => return Err(result.err().unwrap_or(broken)),
        };
        let Some(rank) = errors.iter().position(|error| !error.is_empty()) else { return result };
        let alike = errors.iter().all(|error| *error == errors[0]);
        let error = match result {
            Err(error) if alike => error,
            Err(error) => failure::named(ranks.rank, error),
            Ok(_) => failure::named(rank, failure::from_bytes(&errors[rank])),
        };
        *lock(&ranks.agreed) = Some(Agreed { text: error.to_string(), alike });
        Err(error)
    }

    /// Runs `f` on rank 0 while the others wait, which get `None`; its error is an error of all.
    ///
    /// # Errors
    /// The error of `f`; if a rank has ended or does not respond.
    pub fn on_main<T>(&self, f: impl FnOnce() -> Result<T>) -> Result<Option<T>> {
        self.agree(self.is_main().then(f).transpose())
    }

    /// Checks that `value` is the same on all ranks.
    ///
    /// # Errors
    /// If it is not: the error names the first rank with another value than rank 0.
    pub fn check_same(&self, name: &str, value: &impl Hash) -> Result<()> {
        if self.size() == 1 {
            return Ok(());
        }
        let mut hasher = DefaultHasher::new();
        value.hash(&mut hasher);
        let digests = self.gather_bytes(&hasher.finish().to_le_bytes())?;
        match digests.iter().position(|digest| *digest != digests[0]) {
            None => Ok(()),
            Some(rank) => Err(Error::Run(format!(
                "rank {rank}: {name}: expected those of rank 0, found others; every rank passes the whole batch"
            ))),
        }
    }

    /// Whether all ranks are at the same place in the program after `error`, because [`World::agree`] returned it.
    pub fn in_step(&self, error: &Error) -> bool {
        self.size() == 1 || self.is_agreed(error, |_| true)
    }

    /// Whether all ranks have this same error by themselves, so that one of them need report it.
    pub fn is_alike(&self, error: &Error) -> bool {
        self.is_agreed(error, |agreed| agreed.alike)
    }

    /// Whether `error` is the one that the ranks agreed on last, with or without more words about it, and fulfils `condition`.
    fn is_agreed(&self, error: &Error, condition: impl Fn(&Agreed) -> bool) -> bool {
        let Some(ranks) = &self.ranks else { return false };
        lock(&ranks.agreed).as_ref().is_some_and(|agreed| agreed.is_in(error) && condition(agreed))
    }

    /// Returns the error of the first collective that failed.
    ///
    /// # Errors
    /// That error.
    pub fn check(&self) -> Result<()> {
        self.failed().map_or(Ok(()), |text| Err(Error::Run(text)))
    }

    /// Whether a collective has failed, so that no other can succeed.
    pub fn is_broken(&self) -> bool {
        self.failed().is_some()
    }

    /// Reports the error that ends this process to the other ranks, whose next collective then returns it. The last call of a
    /// rank, before it exits with an error.
    pub fn leave(&self, error: &str) {
        if let Some(ranks) = &self.ranks {
            ranks.leave(error);
        }
    }

    /// [`World::leave`], without the wait for the other ranks to read the error: for a rank that saves its work first, and leaves then.
    pub fn report_failure(&self, error: &str) {
        if let Some(ranks) = &self.ranks {
            ranks.report_failure(error);
        }
    }

    /// Checks that all ranks have these settings, each with the same value.
    ///
    /// # Errors
    /// If not: the error, which is the same on all ranks, names the first rank with another value than rank 0, and the setting.
    pub fn check_settings(&self, sent: &Map<String, Value>) -> Result<()> {
        if self.size() == 1 {
            return Ok(());
        }
        let all = self.gather(sent.clone())?;
        for (rank, found) in all.iter().enumerate() {
            let names = all[0].keys().chain(found.keys().filter(|name| !all[0].contains_key(*name)));
            if let Some(name) = names.into_iter().find(|name| all[0].get(*name) != found.get(*name)) {
                let [expected, found] =
                    [&all[0], found].map(|settings| settings.get(name).map_or("none".into(), Value::to_string));
                return Err(Error::Usage(format!(
                    "{name}: all ranks need the same settings and data: expected rank 0's, {expected}, found {found} on rank {rank}"
                )));
            }
        }
        Ok(())
    }

    /// Returns the time of the collectives since the last call.
    pub fn take_times(&self) -> Times {
        self.ranks.as_ref().map_or(Times::default(), |ranks| std::mem::take(&mut *lock(&ranks.times)))
    }

    /// A value of this rank, for the others.
    fn to_json(&self, sent: &impl Serialize) -> Result<Vec<u8>> {
        let rank = self.rank();
        serde_json::to_vec(sent).map_err(|e| Error::Run(format!("rank {rank}: cannot send a value to the others: {e}")))
    }

    fn failed(&self) -> Option<String> {
        self.ranks.as_ref().and_then(|ranks| lock(&ranks.failure).as_ref().map(|failure| failure.text.clone()))
    }

    fn all_reduce(&self, x: &mut Tensor, reduce: Reduce) -> Result<()> {
        if self.ranks.is_none() {
            return Ok(());
        }
        // A view, such as a slice of flat memory, is contiguous; results of reductions may have any strides.
        let mut dense = x.contiguous();
        self.collective(Size::of(x), |group| Ok(group.all_reduce(&mut dense, reduce)?.unborrowed()))?;
        if dense.data_ptr() != x.data_ptr() {
            x.copy_(&dense);
        }
        Ok(())
    }

    /// Runs a collective of this size. Where it is large, a barrier before it measures the wait for other ranks.
    fn collective(&self, size: Size, f: impl FnOnce(&Group) -> Started) -> Result<()> {
        let Some(ranks) = &self.ranks else { return Ok(()) };
        self.prepare()?;
        if size.bytes >= MEASURED_BYTES && size.device == Device::Cpu {
            let began = Instant::now();
            let waited = ranks.group().barrier();
            lock(&ranks.times).waiting += began.elapsed().as_secs_f64();
            waited.map_err(|e| self.fail(&e))?;
        }
        self.launch(size, f)?.wait()
    }

    /// Starts a collective of this size; see [`Work`].
    fn start(&self, size: Size, f: impl FnOnce(&Group) -> Started) -> Result<Work> {
        self.prepare()?;
        self.launch(size, f)
    }

    /// Makes sure that the world is not broken, and that the other ranks are about to call the same collective.
    fn prepare(&self) -> Result<()> {
        let Some(ranks) = &self.ranks else { return Ok(()) };
        self.check()?;
        self.finish_passes()?;
        ranks.fault.iter().for_each(Fault::count);
        Ok(())
    }

    /// Starts a collective by `f` on the group of the tensors' device.
    fn launch(&self, size: Size, f: impl FnOnce(&Group) -> Started) -> Result<Work> {
        let mut work = Work { world: self.clone(), pending: None };
        let Some(ranks) = &self.ranks else { return Ok(work) };
        let began = Instant::now();
        let group = ranks.group_for(size.device).map_err(|e| self.fail(&e))?;
        let started = f(&group);
        // To find the cause of a failure takes the group.
        drop(group);
        let mut times = lock(&ranks.times);
        times.collectives += began.elapsed().as_secs_f64();
        times.bytes += size.bytes as f64;
        drop(times);
        work.pending = Some(started.map_err(|e| self.fail(&e))?);
        Ok(work)
    }

    /// Breaks the world: finds out which rank caused the error `message` of c10d, and records it.
    fn fail(&self, message: &str) -> Error {
        let Some(ranks) = &self.ranks else { return Error::Run(message.into()) };
        let text = self.failed().unwrap_or_else(|| {
            let failure = ranks.explain(message);
            let text = failure.text.clone();
            *lock(&ranks.failure) = Some(failure);
            text
        });
        Error::Run(text)
    }
}

/// A collective that has been started, or c10d's message.
type Started = std::result::Result<Pending<'static>, String>;

/// The size of a collective's largest tensor, and where it is.
#[derive(Debug, Clone, Copy)]
struct Size {
    bytes: usize,
    device: Device,
}

impl Size {
    fn of(x: &Tensor) -> Self {
        Self { bytes: x.numel() * x.kind().elt_size_in_bytes(), device: x.device() }
    }
}

impl Ranks {
    fn group(&self) -> MutexGuard<'_, Group> {
        lock(&self.group)
    }

    /// The group of tensors on `device`. That of GPUs is made at its first collective, which all ranks reach together.
    ///
    /// # Errors
    /// If the CUDA library is missing or cannot be loaded, or a rank does not come.
    fn group_for(&self, device: Device) -> Result<MutexGuard<'_, Group>, String> {
        let Device::Cuda(index) = device else { return Ok(self.group()) };
        if let Some(group) = self.gpu_group.get() {
            return Ok(lock(group));
        }
        let path = cuda_library_in(&tch_ext::libtorch_folder()?)?;
        let group = self
            .group()
            .with_nccl(&path.to_string_lossy(), index, self.timeout)
            .map_err(|e| format!("cuda:{index}: {e}"))?;
        Ok(lock(self.gpu_group.get_or_init(|| Mutex::new(group))))
    }
}

/// Restores a value that `rank` has sent.
///
/// # Errors
/// If it is another one, as between ranks of two versions.
fn from_json<T: DeserializeOwned>(rank: usize, bytes: &[u8]) -> Result<T> {
    serde_json::from_slice(bytes)
        .map_err(|e| Error::Run(format!("a value that rank {rank} has sent cannot be read: {e}")))
}

/// Returns the path of the library by which ranks on GPUs communicate, in the folder of libtorch's libraries: `make cuda` builds it, and
/// the Python package brings it for CUDA 13.
pub fn cuda_library_in(folder: &Path) -> Result<PathBuf, String> {
    let path = folder.join(tch_ext::CUDA_LIBRARY);
    if path.is_file() {
        return Ok(path);
    }
    let hint = if process::is_of_python_package() {
        "the Python package has one for torch 2.11.0 with CUDA 13"
    } else {
        "`make cuda` builds it"
    };
    Err(format!("no CUDA library: expected {}; {hint}", path.display()))
}

/// The part of `rank` of `rows` rows.
pub fn share(rows: usize, rank: usize, size: usize) -> Range<usize> {
    rank * rows / size..(rank + 1) * rows / size
}

/// [`World::shares_by`] of `size` ranks.
pub fn shares_by(weights: &[usize], size: usize) -> Vec<Range<usize>> {
    let total: usize = weights.iter().sum();
    let mut ends = vec![0; size];
    let mut before = 0;
    for (row, &weight) in weights.iter().enumerate() {
        // A row belongs to the rank that its middle falls to.
        let rank = ((2 * before + weight) * size / (2 * total).max(1)).min(size - 1);
        before += weight;
        ends[rank] = row + 1;
    }
    let mut start = 0;
    ends.into_iter()
        .map(|end| {
            let part = start..end.max(start);
            start = part.end;
            part
        })
        .collect()
}

/// Calls `f` on two threads, each a rank of one world, and returns the results in the order of ranks. For tests.
///
/// # Panics
/// If the ranks do not meet, or `f` panics.
#[doc(hidden)]
pub fn as_two_ranks<T: Send>(f: impl Fn(World) -> T + Sync) -> [T; 2] {
    let free = std::net::TcpListener::bind(("127.0.0.1", 0)).and_then(|listener| listener.local_addr());
    let port = free.expect("a free port").port();
    let rank = |rank: usize| {
        let launch = Launch {
            rank,
            size: 2,
            local_rank: rank,
            local_size: 2,
            host: "127.0.0.1".into(),
            port,
            serves_store: rank == 0,
            launcher_serves_store: false,
            restart: 0,
            key_prefix: "test".into(),
        };
        f(World::connect(&launch, MEETING).expect("two ranks"))
    };
    std::thread::scope(|scope| {
        let other = scope.spawn(|| rank(1));
        let sent = rank(0);
        [sent, other.join().expect("rank 1")]
    })
}

/// Locks a value that no panic leaves half changed.
fn lock<T>(value: &Mutex<T>) -> MutexGuard<'_, T> {
    value.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_rank_keeps_every_number_and_decision() {
        let world = World::single();
        assert_eq!((world.rank(), world.size(), world.is_main()), (0, 1, true));
        assert_eq!(world.share(7), 0..7);
        let mut x = Tensor::from_slice(&[1.0f32, 2.0]);
        world.sum(&mut x).unwrap();
        assert_eq!(Vec::<f32>::try_from(world.gather_rows(&x, &[2]).unwrap()).unwrap(), [1.0, 2.0]);
        let mut numbers = [3.0, f64::INFINITY];
        world.sum_numbers(&mut numbers).unwrap();
        assert_eq!(numbers, [3.0, f64::INFINITY]);
        assert!(world.any(true).unwrap() && !world.any(false).unwrap());
        assert!(world.all(true).unwrap() && !world.all(false).unwrap());
        assert_eq!(world.gather_bytes(b"ab").unwrap(), [b"ab"]);
        assert_eq!(world.broadcast_bytes(Some(vec![1])).unwrap(), [1]);
        // Values stay as they are: JSON has no infinity.
        assert_eq!(world.gather(f64::INFINITY).unwrap(), [f64::INFINITY]);
        assert_eq!(world.broadcast(f64::INFINITY).unwrap(), f64::INFINITY);
        assert_eq!(world.agree(Ok(5)).unwrap(), 5);
        assert_eq!(world.on_main(|| Ok(5)).unwrap(), Some(5));
        let error = world.agree::<()>(Err(Error::Run("no".into()))).unwrap_err();
        assert!(error.to_string() == "no" && world.in_step(&error) && !world.is_alike(&error));
        assert_eq!((world.local_rank(), world.min_count(3).unwrap(), world.own_part(&[1, 2], |_| 1)), (0, 3, 0..2));
    }

    #[test]
    fn the_store_of_ranks_on_one_machine_listens_on_the_loopback_interface_alone() {
        let free = std::net::TcpListener::bind(("127.0.0.1", 0)).unwrap().local_addr().unwrap();
        let (second, port) = (Duration::from_secs(1), free.port());
        let host = "127.0.0.1".to_string();
        let rendezvous = Rendezvous {
            host,
            port,
            serves: true,
            prefix: "test".into(),
            rank: 0,
            size: 1,
            patience: second,
            timeout: second,
        };
        let store = tch_ext::Store::open(&rendezvous).unwrap();
        store.set("key", "value").unwrap();
        let read = |table: &str| std::fs::read_to_string(format!("/proc/net/{table}")).unwrap_or_default();
        let tables = [read("tcp"), read("tcp6")].concat();
        // Hexadecimal address and port, and state 0A for a socket that listens.
        let listens = |line: &str| {
            let words: Vec<&str> = line.split_whitespace().collect();
            let local = words.get(1)?.strip_suffix(&format!(":{port:04X}"))?;
            (*words.get(3)? == "0A").then(|| local.to_string())
        };
        assert_eq!(tables.lines().filter_map(listens).collect::<Vec<_>>(), ["0100007F"]);
    }

    #[test]
    fn a_missing_cuda_library_is_named_with_the_command_that_builds_it() {
        let folder = tempfile::tempdir().unwrap();
        let error = cuda_library_in(folder.path()).unwrap_err();
        assert!(error.contains("libtch_ext_cuda.so; `make cuda` builds it"), "{error}");
        std::fs::write(folder.path().join("libtch_ext_cuda.so"), "").unwrap();
        cuda_library_in(folder.path()).unwrap();
    }

    #[test]
    fn shares_hold_every_row_once_in_order() {
        for size in 1..6 {
            for weights in
                [vec![], vec![3], vec![1; 7], vec![100, 1, 1, 1, 1, 1], vec![0, 0, 0], vec![1, 2, 3, 4, 5, 60]]
            {
                for parts in
                    [shares_by(&weights, size), (0..size).map(|rank| share(weights.len(), rank, size)).collect()]
                {
                    assert_eq!(parts.len(), size);
                    let rows: Vec<usize> = parts.into_iter().flatten().collect();
                    assert_eq!(rows, (0..weights.len()).collect::<Vec<_>>());
                }
            }
        }
        assert_eq!(shares_by(&[10, 10, 20, 40], 2), [0..3, 3..4]);
    }
}
