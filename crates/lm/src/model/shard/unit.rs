//! A unit: some parameters of a model in one vector, of which each rank has a part.

use crate::model::params::Param;
use rlhf_base::dist::{Work, World, ZeroStage};
use rlhf_base::{Error, Result};
use std::collections::VecDeque;
use tch::{Device, Kind, Tensor};
use tch_ext::{FlatMemory, bump_version, clear_grad, set_grad};

/// A rank's part of a vector has a multiple of this many elements, as NCCL and vector instructions prefer.
const ALIGNMENT: u64 = 64;

/// Bytes above which glibc maps memory by itself and returns it to the system when it is freed. Memory that is allocated and freed
/// for every layer would otherwise leave holes between what stays.
const MAPPED_BYTES: i64 = (32 << 20) + (1 << 12);

/// Most elements of a collective on the CPU, where Gloo takes as much memory again; larger vectors go in pieces.
const AT_ONCE: i64 = 1 << 22;

/// Place of a parameter in the vector of its unit.
#[derive(Debug, Clone)]
pub struct Slot {
    pub name: String,
    pub start: i64,
    pub shape: Vec<i64>,
}

impl Slot {
    pub fn len(&self) -> i64 {
        self.shape.iter().product()
    }

    /// The parameter's elements in the vector `whole` of its unit.
    pub fn of(&self, whole: &Tensor) -> Tensor {
        whole.narrow(0, self.start, self.len()).view(self.shape.as_slice())
    }
}

/// Parameters of one layer, or of the root, that have one dtype and are all trained or all frozen.
#[derive(Debug)]
pub(super) struct Unit {
    /// The layer; `None` for the root.
    pub(super) layer: Option<usize>,
    pub(super) trained: bool,
    pub(super) slots: Vec<Slot>,
    /// The model's tensors, in the order of the slots.
    pub(super) params: Vec<Tensor>,
    /// Number of leading elements that weight decay applies to.
    pub(super) decaying: i64,
    /// Length of the whole vector.
    pub(super) len: i64,
    pub(super) kind: Kind,
    pub(super) device: Device,
    /// The parameters, and unused elements after them, from stage 1 on; without memory in stage 3 while `holders` is 0.
    pub(super) whole: Option<FlatMemory>,
    /// This rank's part of the parameters: a view of `whole`, memory of its own in stage 3.
    pub(super) part: Option<Tensor>,
    /// Gradients of the whole vector: in stages 0 and 1 from the first backward pass on, in later stages in the backward pass.
    pub(super) grads: Option<Tensor>,
    /// This rank's part of the summed gradients, from the first reduction to the optimizer step.
    pub(super) grad_part: Option<Tensor>,
    /// Number of guards that need the parameters; one more while they are prefetched or kept, until a guard takes them over.
    pub(super) holders: usize,
    /// The gather of the parameters that is in progress, before their layer is computed.
    prefetch: Option<Transfer>,
    /// Whether the parameters are kept since their layer was computed, as it comes next again.
    is_kept: bool,
    /// The reduction of the gradients that is in progress, and this rank's part of the sum, `[len / ranks]` f32, which it fills.
    reduction: Option<(Transfer, Tensor)>,
    /// This rank's parts of the optimizer state and of a moving average.
    pub(super) state: UnitState,
}

/// Vectors of a unit's size other than its parameters, this rank's part of each.
#[derive(Debug, Default)]
pub(super) struct UnitState {
    /// Both moments of AdamW.
    pub(super) moments: Option<[Tensor; 2]>,
    /// The moving average of the parameters, or the parameters while the two are swapped.
    pub(super) average: Option<Tensor>,
}

impl Unit {
    /// Moves `params` into flat memory, those that decay first, and keeps this rank's part of it.
    pub(super) fn new((world, stage): (&World, ZeroStage), layer: Option<usize>, params: &[&Param]) -> Self {
        let size = world.size() as u64;
        let (decays, others): (Vec<&Param>, Vec<&Param>) = params.iter().copied().partition(|param| param.decay);
        let numel = |param: &Param| param.tensor.numel() as i64;
        let decaying = decays.iter().map(|param| numel(param)).sum();
        let (kind, device) = (params[0].tensor.kind(), params[0].tensor.device());
        let trained = params[0].tensor.requires_grad();
        let (mut slots, mut tensors, mut start) = (Vec::new(), Vec::new(), 0);
        for param in decays.into_iter().chain(others) {
            slots.push(Slot { name: param.name.clone(), start, shape: param.tensor.size() });
            tensors.push(param.tensor.shallow_clone());
            start += numel(param);
        }
        let len = (start as u64).next_multiple_of(ALIGNMENT * size) as i64;
        let part_len = len / size as i64;
        let mut unit = Self {
            layer,
            trained,
            slots,
            params: tensors,
            decaying,
            len,
            kind,
            device,
            whole: None,
            part: None,
            grads: None,
            grad_part: None,
            holders: 0,
            prefetch: None,
            is_kept: false,
            reduction: None,
            state: UnitState::default(),
        };
        if stage.shards_optimizer() {
            let allocated = if stage.shards_parameters() { mapped_len(len, kind, device) } else { len };
            let whole = FlatMemory::new(allocated, kind, device);
            // Only the padding: the parameters are copied. Mapped memory beyond it is never used.
            let _ = whole.tensor().narrow(0, start, len - start).zero_();
            for (slot, param) in unit.slots.iter().zip(&mut unit.params) {
                let view = slot.of(whole.tensor());
                tch::no_grad(|| view.shallow_clone().copy_(param));
                param.set_data(&view);
            }
            let part = whole.tensor().narrow(0, part_len * world.rank() as i64, part_len);
            unit.part = Some(if stage.shards_parameters() { part.copy() } else { part });
            if stage.shards_parameters() {
                whole.free();
            }
            unit.whole = Some(whole);
        }
        unit
    }

    /// Makes views of `grads`, which are zero, the tensors in which the parameters' gradients accumulate.
    pub(super) fn use_gradients(&mut self, grads: Tensor) -> Result<()> {
        let mut pairs = self.slots.iter().zip(&self.params);
        pairs.try_for_each(|(slot, param)| set_grad(param, &slot.of(&grads))).map_err(Error::Run)?;
        self.grads = Some(grads);
        Ok(())
    }

    /// Provides gradients of the whole vector, unless there are some. Weights in bf16 have gradients in bf16; they are never sharded.
    pub(super) fn keep_gradients(&mut self) -> Result<&mut Tensor> {
        if self.grads.is_none() {
            self.use_gradients(Tensor::zeros([self.len], (self.kind, self.device)))?;
        }
        Ok(self.grads.as_mut().expect("they were just provided"))
    }

    /// Frees the gradients of the whole vector.
    pub(super) fn release_gradients(&mut self) -> Result<()> {
        self.take_gradients().map(drop)
    }

    /// Takes the gradients of the whole vector from the parameters; none if there are none.
    fn take_gradients(&mut self) -> Result<Option<Tensor>> {
        let grads = self.grads.take();
        if grads.is_some() {
            self.params.iter().try_for_each(clear_grad).map_err(Error::Run)?;
        }
        Ok(grads)
    }

    /// Gathers the parameters until [`Unit::release`]: also if this rank has them already, as other ranks may not, unless all have kept
    /// them. Waits for the prefetch, if there is one.
    pub(super) fn gather(&mut self, world: &World) -> Result<()> {
        if std::mem::take(&mut self.is_kept) {
            return Ok(());
        }
        if let Some(prefetch) = self.prefetch.take() {
            return prefetch.wait(world);
        }
        let Some((whole, part)) = self.hold()? else { return Ok(()) };
        run(world, Collective::AllGather, &whole, &part)
    }

    /// Starts to gather the parameters, for the next [`Unit::gather`].
    pub(super) fn prefetch(&mut self, world: &World) -> Result<()> {
        let Some((whole, part)) = self.hold()? else { return Ok(()) };
        match Transfer::start(world, Collective::AllGather, &whole, &part) {
            Ok(transfer) => self.prefetch = Some(transfer),
            Err(error) => {
                self.release();
                return Err(error);
            }
        }
        Ok(())
    }

    /// Keeps the parameters, which are gathered, for the next [`Unit::gather`]; on all ranks.
    pub(super) fn keep(&mut self) {
        self.holders += 1;
        self.is_kept = true;
    }

    /// Counts a holder, and provides memory for the parameters. Returns the whole vector and this rank's part, if the unit is divided.
    fn hold(&mut self) -> Result<Option<(Tensor, Tensor)>> {
        let parts = self.whole.as_ref().zip(self.part.as_ref());
        if let Some((whole, _)) = parts.filter(|_| self.holders == 0) {
            whole.allocate().map_err(Error::Run)?;
        }
        self.holders += 1;
        Ok(parts.map(|(whole, part)| (whole.tensor().narrow(0, 0, self.len), part.shallow_clone())))
    }

    /// Waits for all that is in progress, and releases parameters that were gathered or kept for nothing.
    pub(super) fn settle(&mut self, world: &World) -> Result<()> {
        if std::mem::take(&mut self.is_kept) {
            self.release();
        }
        let gathered = self.prefetch.take().map(|prefetch| {
            let done = prefetch.wait(world);
            self.release();
            done
        });
        let reduced = self.finish_reduction(world);
        gathered.unwrap_or(Ok(())).and(reduced)
    }

    #[cfg(test)]
    pub(super) fn is_prefetched(&self) -> bool {
        self.prefetch.is_some()
    }

    #[cfg(test)]
    pub(super) fn is_reduced(&self) -> bool {
        self.reduction.is_some()
    }

    pub(super) fn release(&mut self) {
        self.holders = self.holders.saturating_sub(1);
        if let Some(whole) = self.whole.as_ref().filter(|_| self.holders == 0) {
            whole.free();
        }
    }

    /// Makes this rank's part a view of the gathered vector, so that it takes no memory of its own; or ends this.
    pub(super) fn view_part(&mut self, world: &World, views: bool) {
        let (Some(whole), Some(part)) = (&self.whole, &mut self.part) else { return };
        let len = part.numel() as i64;
        let place = whole.tensor().narrow(0, len * world.rank() as i64, len);
        // In all its handles, of which the optimizer has one.
        part.set_data(&if views { place } else { place.copy() });
    }

    pub(super) fn lend_gradients(&mut self) -> Result<()> {
        let allocated = mapped_len(self.len, Kind::Float, self.device);
        self.use_gradients(Tensor::empty([allocated], (Kind::Float, self.device)).narrow(0, 0, self.len).zero_())
    }

    /// Takes the lent gradients back, and starts to sum them over all ranks, until [`Unit::finish_reduction`].
    pub(super) fn start_reduction(&mut self, world: &World) -> Result<()> {
        let Some(grads) = self.take_gradients()? else { return Ok(()) };
        let sum = self.zero_part(world);
        self.reduction = Some((Transfer::start(world, Collective::ReduceScatter, &grads, &sum)?, sum));
        Ok(())
    }

    /// Waits for the reduction in progress, if there is one, and adds its sum to this rank's part.
    pub(super) fn finish_reduction(&mut self, world: &World) -> Result<()> {
        let Some((transfer, sum)) = self.reduction.take() else { return Ok(()) };
        transfer.wait(world)?;
        match &mut self.grad_part {
            Some(part) => drop(part.g_add_(&sum)),
            part => *part = Some(sum),
        }
        Ok(())
    }

    /// Sums the gradients of a unit that keeps them whole, in f32. A rank without a pass has zeros.
    pub(super) fn sum_whole(&mut self, world: &World) -> Result<()> {
        let grads = self.keep_gradients()?;
        if grads.kind() == Kind::Float {
            return world.sum(grads);
        }
        let mut sum = grads.to_kind(Kind::Float);
        world.sum(&mut sum)?;
        grads.copy_(&sum);
        Ok(())
    }

    /// Sets this rank's part to the sum of the gradients of a unit that keeps them whole.
    pub(super) fn reduce_whole(&mut self, world: &World) -> Result<()> {
        let grads = self.keep_gradients()?.shallow_clone();
        let part = self.zero_part(world);
        run(world, Collective::ReduceScatter, &grads, &part)?;
        self.grad_part = Some(part);
        Ok(())
    }

    /// Zeros of the length of this rank's part, in f32.
    fn zero_part(&self, world: &World) -> Tensor {
        Tensor::zeros([self.len / world.size() as i64], (Kind::Float, self.device))
    }

    /// This rank's part of the summed gradients; zeros if no pass has reached them.
    pub(super) fn grad_part(&self, world: &World) -> Tensor {
        self.grad_part.as_ref().map_or_else(|| self.zero_part(world), Tensor::shallow_clone)
    }

    pub(super) fn scale_gradients(&mut self, factor: f64) {
        // The part is there once the gradients are summed, and then counts.
        if let Some(grads) = self.grad_part.as_mut().or(self.grads.as_mut()) {
            let _ = grads.g_mul_scalar_(factor);
        }
    }

    pub(super) fn zero_gradients(&mut self, lent: bool) {
        if lent {
            // A pass that failed has not taken them back.
            let _ = self.release_gradients();
        }
        self.grad_part = None;
        if let Some(grads) = &mut self.grads {
            let _ = grads.zero_();
        }
    }

    pub(super) fn gather_stepped(&self, world: &World) -> Result<()> {
        let (Some(whole), Some(part)) = (&self.whole, &self.part) else { return Ok(()) };
        if whole.is_allocated() {
            // A copy, as the part may be a view of the whole.
            run(world, Collective::AllGather, &whole.tensor().narrow(0, 0, self.len), &part.copy())?;
        }
        self.params.iter().for_each(bump_version);
        Ok(())
    }

    /// Both moments of the whole vector, on the host.
    pub(super) fn whole_moments(&self, world: &World) -> Result<[Tensor; 2]> {
        let Some([first, second]) = &self.state.moments else {
            return Err(Error::Run("sharded optimizer state: this rank has none: a bug".into()));
        };
        let gather = |part: &Tensor| {
            let whole = Tensor::empty([self.len], (part.kind(), part.device()));
            run(world, Collective::AllGather, &whole, part).map(|()| whole.to_device(Device::Cpu))
        };
        Ok([gather(first)?, gather(second)?])
    }

    pub(super) fn read(
        &self,
        rank: i64,
        reads: &impl Fn(&str) -> bool,
        read: &mut impl FnMut(&str, &Tensor) -> Result<()>,
    ) -> Result<()> {
        let (Some(whole), Some(part)) = (&self.whole, &self.part) else { return Ok(()) };
        let len = part.numel() as i64;
        let (start, end) = (rank * len, (rank + 1) * len);
        for slot in self.slots.iter().filter(|slot| reads(&slot.name)) {
            let tensor = Tensor::empty(slot.shape.as_slice(), (whole.tensor().kind(), self.device));
            read(&slot.name, &tensor)?;
            let (from, to) = (slot.start.max(start), (slot.start + slot.len()).min(end));
            if from < to {
                let source = tensor.view([-1]).narrow(0, from - slot.start, to - from);
                part.narrow(0, from - start, to - from).copy_(&source);
            }
        }
        self.params.iter().for_each(bump_version);
        Ok(())
    }
}

/// The length of a vector of `len` elements whose memory is mapped by itself on the CPU. Only memory that is used takes space.
fn mapped_len(len: i64, kind: Kind, device: Device) -> i64 {
    let min_len = if device == Device::Cpu { MAPPED_BYTES / kind.elt_size_in_bytes() as i64 } else { 0 };
    len.max(min_len)
}

/// A collective of a whole vector and of this rank's part of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Collective {
    /// Fills the whole vector with the parts of all ranks.
    AllGather,
    /// Fills the part with this rank's part of the sum of all ranks' whole vectors.
    ReduceScatter,
}

/// A piece of a vector, which goes in one collective.
#[derive(Debug)]
struct Piece {
    /// Its places in the parts of all ranks, in the order of ranks; the whole vector alone, if it is not large.
    places: Vec<Tensor>,
    /// Its place in this rank's part.
    part: Tensor,
}

impl Piece {
    /// The vector of all ranks' numbers that the collective reads or fills: a copy, where the places lie apart.
    fn joined(&self, collective: Collective) -> Tensor {
        match (self.places.as_slice(), collective) {
            ([whole], _) => whole.shallow_clone(),
            (places, Collective::ReduceScatter) => Tensor::cat(places, 0),
            (places, Collective::AllGather) => {
                let len = (self.part.numel() * places.len()) as i64;
                Tensor::empty([len], (self.part.kind(), self.part.device()))
            }
        }
    }

    /// Copies what the collective has gathered to its places.
    fn store(mut self, collective: Collective, joined: &Tensor) {
        if collective == Collective::AllGather && self.places.len() > 1 {
            let parts = joined.chunk(self.places.len() as i64, 0);
            self.places.iter_mut().zip(parts).for_each(|(place, part)| tch::no_grad(|| place.copy_(&part)));
        }
    }

    fn run(mut self, world: &World, collective: Collective) -> Result<()> {
        let mut joined = self.joined(collective);
        match collective {
            Collective::AllGather => world.all_gather(&mut joined, &self.part),
            Collective::ReduceScatter => world.reduce_scatter(&mut self.part, &joined),
        }?;
        self.store(collective, &joined);
        Ok(())
    }
}

/// Runs a collective of `whole` and this rank's `part` of it.
fn run(world: &World, collective: Collective, whole: &Tensor, part: &Tensor) -> Result<()> {
    pieces(world, whole, part).into_iter().try_for_each(|piece| piece.run(world, collective))
}

/// A collective in progress. Of a vector that goes in several pieces the first is: all at once would take as much memory as the vector.
#[derive(Debug)]
struct Transfer {
    collective: Collective,
    work: Work,
    first: Piece,
    joined: Tensor,
    rest: VecDeque<Piece>,
}

impl Transfer {
    /// Starts a collective of `whole` and this rank's `part` of it, which stay as they are until it is waited for.
    fn start(world: &World, collective: Collective, whole: &Tensor, part: &Tensor) -> Result<Self> {
        let mut rest = VecDeque::from(pieces(world, whole, part));
        let first = rest.pop_front().expect("a vector has a piece");
        let joined = first.joined(collective);
        let work = match collective {
            Collective::AllGather => world.start_all_gather(&joined, &first.part),
            Collective::ReduceScatter => world.start_reduce_scatter(&first.part, &joined),
        }?;
        Ok(Self { collective, work, first, joined, rest })
    }

    /// Waits for the first piece, and runs the others.
    fn wait(self, world: &World) -> Result<()> {
        self.work.wait()?;
        self.first.store(self.collective, &self.joined);
        self.rest.into_iter().try_for_each(|piece| piece.run(world, self.collective))
    }
}

/// The pieces in which a vector is gathered or summed: several of a large one on the CPU.
fn pieces(world: &World, whole: &Tensor, part: &Tensor) -> Vec<Piece> {
    let (whole_len, part_len, size) = (whole.numel() as i64, part.numel() as i64, world.size() as i64);
    if size == 1 || whole_len <= 2 * AT_ONCE || whole.device() != Device::Cpu {
        return vec![Piece { places: vec![whole.shallow_clone()], part: part.shallow_clone() }];
    }
    let longest = (AT_ONCE / size).max(1);
    let piece = |start: i64| {
        let len = longest.min(part_len - start);
        let places = (0..size).map(|rank| whole.narrow(0, rank * part_len + start, len)).collect();
        Piece { places, part: part.narrow(0, start, len) }
    };
    (0..part_len).step_by(longest as usize).map(piece).collect()
}

/// The parameters of each unit with their layer, the root first. Below stage 3 only trained parameters.
pub(super) fn unit_params(
    params: &[Param],
    stage: ZeroStage,
    layer_of: impl Fn(&str) -> Option<usize>,
) -> Vec<(Option<usize>, Vec<&Param>)> {
    type Key = (Option<usize>, bool, Kind);
    let mut units: Vec<(Key, Vec<&Param>)> = Vec::new();
    // Quantized weights stay whole on every rank.
    let divides = |param: &&Param| !param.is_quantized() && (stage.shards_parameters() || param.tensor.requires_grad());
    for param in params.iter().filter(divides) {
        let key = (layer_of(&param.name), param.tensor.requires_grad(), param.tensor.kind());
        match units.iter_mut().find(|(unit_key, _)| *unit_key == key) {
            Some((_, unit)) => unit.push(param),
            None => units.push((key, vec![param])),
        }
    }
    units.sort_by_key(|((layer, ..), _)| *layer);
    units.into_iter().map(|((layer, ..), params)| (layer, params)).collect()
}
