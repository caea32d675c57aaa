//! ZeRO: a model's gradients, optimizer state and parameters, divided over ranks (Rajbhandari et al. 2020).
//!
//! Parameters of one layer that have one dtype, and are all trained or all frozen, form a *unit*: one vector, padded so that
//! every rank has an equal part of it. Parameters outside the layers (embeddings, final norm, heads) form units of their own,
//! the *root*. The tensors of the model are views of the vectors, so no code outside this file knows about them:
//!
//! | stage | parameters | gradients | optimizer state |
//! |---|---|---|---|
//! | 0 | whole | whole, summed over ranks before a step | whole |
//! | 1 | whole, gathered after a step | whole; each rank gets its part of the sum | part |
//! | 2 | whole, gathered after a step | part; a layer's gradients are reduced after its backward pass | part |
//! | 3 | part; a layer is gathered for its forward and its backward pass | as in stage 2 | part |
//!
//! The root is gathered for a whole pass, so that a head may share the memory of the embedding.
//!
//! Within a pass of several ranks, communication runs while something is computed: the next layer is gathered, from the first on, and the
//! gradients of the layer before it in the backward pass are reduced; one of each at a time. The last layer stays between its forward and its
//! backward pass. What is in progress at the end of a pass is waited for there, also if the pass fails, so collectives outside passes find
//! none.
//!
//! In stages 2 and 3 passes contain collectives, which all ranks must call, but ranks run different numbers of passes. So each
//! pass is announced, and a rank that has no pass left takes part in those of the others; see [`World::announce_pass`].

mod unit;

use super::params::Param;
use rlhf_base::dist::{Sharded, World, ZeroStage};
use rlhf_base::{Error, Result};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tch::{Kind, Tensor};
pub(crate) use unit::Slot;
use unit::{Unit, unit_params};

/// The division of a model over ranks; none until a model is divided. Clones refer to the same division, as models that share
/// their memory do.
#[derive(Debug, Clone, Default)]
pub struct Shards(Arc<Divided>);

/// A division that other ranks may ask to take part in a pass.
#[derive(Debug, Default)]
struct Divided(Mutex<Option<Division>>);

impl Divided {
    fn lock(&self) -> MutexGuard<'_, Option<Division>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A pass through a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PassKind {
    /// A forward pass.
    Forward,
    /// A forward and a backward pass.
    Backward,
    /// A decoding step, without the layers of an encoder.
    Step,
}

/// The order in which layers are computed, which says what layer is gathered next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// From the first layer to the last.
    Forward,
    /// From the first layer to the last, in a pass that goes back from there: the last layer's parameters stay.
    ForwardAndBack,
    /// From the last layer to the first.
    Backward,
}

/// A trained vector, for the optimizer: this rank's part of it.
#[derive(Debug)]
pub struct TrainedPart {
    /// The parameters, a vector in f32.
    pub params: Tensor,
    /// Number of leading elements that weight decay applies to.
    pub decaying: i64,
    /// Place of the part's first element in the whole vector.
    pub start: i64,
    /// The parameters of the whole vector.
    pub slots: Vec<Slot>,
}

#[derive(Debug)]
struct Division {
    /// The ranks, for collectives of announced passes.
    world: World,
    /// The same ranks, for collectives outside passes.
    outer: World,
    stage: ZeroStage,
    /// Number of this model in announcements; the same on all ranks.
    id: u64,
    /// Numbers of the encoder's layers, which are the first, and of all.
    layers: [usize; 2],
    /// The root's units, then those of each layer.
    units: Vec<Unit>,
    /// Whether the gradients are those of all ranks.
    reduced: bool,
    /// Number of guards that hold all units.
    gathered: usize,
}

/// A request of rank 0 to the other ranks while it writes a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Request {
    /// The parameters of a unit.
    Params(usize),
    /// The optimizer state of a unit.
    Moments(usize),
    /// To swap the parameters and their moving average.
    Swap,
}

impl Request {
    /// Number of different requests about one unit.
    const KINDS: usize = 3;

    fn number(self) -> usize {
        match self {
            Self::Params(unit) => Self::KINDS * unit,
            Self::Moments(unit) => Self::KINDS * unit + 1,
            Self::Swap => 2,
        }
    }

    fn from_number(number: usize) -> Self {
        match number % Self::KINDS {
            0 => Self::Params(number / Self::KINDS),
            1 => Self::Moments(number / Self::KINDS),
            _ => Self::Swap,
        }
    }
}

/// Holds the root's parameters for one pass.
#[derive(Debug)]
#[must_use = "the parameters are released when the guard is dropped"]
pub struct RootGuard(Shards);

/// Holds the parameters of one layer.
#[derive(Debug)]
#[must_use = "the parameters are released when the guard is dropped"]
pub struct LayerGuard(Shards, usize);

/// Holds all parameters.
#[derive(Debug)]
#[must_use = "the parameters are released when the guard is dropped"]
pub struct AllGuard(Shards);

/// Gathers parameters by name, one unit at a time.
#[derive(Debug)]
pub struct ByName {
    shards: Shards,
    /// Index of the gathered unit.
    gathered: Option<usize>,
    /// Whether this rank asks the others, which [serve](Shards::serve); else all ranks gather the same names.
    asks: bool,
}

impl Shards {
    fn lock(&self) -> MutexGuard<'_, Option<Division>> {
        self.0.lock()
    }

    /// Calls `f` with the division, if there is one.
    fn with<T>(&self, f: impl FnOnce(&mut Division) -> T) -> Option<T> {
        self.lock().as_mut().map(f)
    }

    /// Divides `params` over the ranks of `world`. `layers` are the numbers of the encoder's layers, which are the first, and of all;
    /// `layer_of` returns the layer of a parameter by its name. The parameters become views of flat memory. Does nothing if they are
    /// divided already, or if there is nothing to divide: one rank at stage 0, or a frozen model below stage 3.
    ///
    /// All ranks have the same parameters, and divide their models in the same order.
    pub fn divide(
        &self,
        (world, stage): (&World, ZeroStage),
        params: &[Param],
        layers: [usize; 2],
        layer_of: impl Fn(&str) -> Option<usize>,
    ) {
        let mut division = self.lock();
        let alone = world.size() == 1 && !stage.shards_optimizer();
        let groups = unit_params(params, stage, layer_of);
        if division.is_some() || alone || groups.is_empty() {
            return;
        }
        let units = groups.into_iter().map(|(layer, params)| Unit::new((world, stage), layer, &params)).collect();
        let (outer, id) = (world.clone(), world.next_id());
        let world = outer.inside_pass();
        *division =
            Some(Division { world, outer: outer.clone(), stage, id, layers, units, reduced: false, gathered: 0 });
        drop(division);
        if stage.shards_gradients() {
            let model: Arc<dyn Sharded> = self.0.clone();
            outer.add_sharded(Arc::downgrade(&model));
        }
        // The tensors that flat memory has replaced.
        tch_ext::release_memory();
    }

    /// The stage of the division, if the model is divided.
    pub fn stage(&self) -> Option<ZeroStage> {
        self.with(|division| division.stage)
    }

    /// Whether parameters have memory only while a guard holds them.
    pub fn are_params_divided(&self) -> bool {
        self.stage().is_some_and(ZeroStage::shards_parameters)
    }

    /// Whether gradients are reduced layer by layer, in the backward pass.
    pub fn are_gradients_divided(&self) -> bool {
        self.stage().is_some_and(ZeroStage::shards_gradients)
    }

    /// Whether parameters are released after each layer: they are divided, and no guard holds all of them.
    pub fn releases(&self) -> bool {
        self.with(|division| division.releases()).unwrap_or(false)
    }

    /// Announces a pass, gathers the root, and starts to gather the first layer.
    ///
    /// # Errors
    /// If a rank has ended or does not respond.
    pub fn start_pass(&self, kind: PassKind) -> Result<RootGuard> {
        let announced = self.with(|division| division.has_collectives(kind).then(|| division.code(kind)));
        if let (Some(code), Some(world)) = (announced.flatten(), self.outer()) {
            world.announce_pass(code)?;
        }
        // Dropped if the start fails: nothing stays in progress.
        let root = RootGuard(self.clone());
        self.with(|division| division.start_pass(kind)).unwrap_or(Ok(()))?;
        Ok(root)
    }

    /// The ranks, for collectives outside passes; none if the model is not divided.
    fn outer(&self) -> Option<World> {
        self.with(|division| division.outer.clone())
    }

    /// Takes part in the passes that other ranks still run, before collectives outside passes; the division is not locked.
    fn finish_passes(&self) -> Result<()> {
        self.outer().map_or(Ok(()), |world| world.finish_passes())
    }

    /// Gathers layer `layer` inside a pass, and starts to gather the one that comes next in this direction.
    ///
    /// # Errors
    /// As [`Shards::start_pass`].
    pub fn layer(&self, layer: usize, direction: Direction) -> Result<LayerGuard> {
        self.with(|division| division.gather(Some(layer))).unwrap_or(Ok(()))?;
        // It frees the layer if the next cannot be started.
        let guard = LayerGuard(self.clone(), layer);
        self.with(|division| division.look_ahead(layer, direction)).unwrap_or(Ok(()))?;
        Ok(guard)
    }

    /// Provides memory for the gradients of `layer`, or of the root, for its backward pass.
    ///
    /// # Errors
    /// If libtorch refuses.
    pub fn lend_gradients(&self, layer: Option<usize>) -> Result<()> {
        self.with(|division| division.lend_gradients(layer)).unwrap_or(Ok(()))
    }

    /// Starts to add the sum over all ranks of the gradients of `layer` to this rank's part. It is done at the next call, or at the end
    /// of the pass.
    ///
    /// # Errors
    /// As [`Shards::start_pass`].
    pub fn reduce_layer(&self, layer: usize) -> Result<()> {
        self.with(|division| division.reduce_lent(Some(layer))).unwrap_or(Ok(()))
    }

    /// Gathers all parameters until the guard is dropped. Passes then need no collectives but those of gradients. Called by all
    /// ranks at the same point.
    ///
    /// # Errors
    /// As [`Shards::start_pass`].
    pub fn gather_all(&self) -> Result<AllGuard> {
        self.finish_passes()?;
        let gathered = self.with(|division| {
            let releases = division.releases();
            for unit in division.units.iter_mut().filter(|_| releases) {
                unit.gather(&division.world)?;
                unit.view_part(&division.world, true);
            }
            division.gathered += 1;
            Ok(())
        });
        gathered.unwrap_or(Ok(())).map(|()| AllGuard(self.clone()))
    }

    /// Returns a guard that gathers parameters by name. With `asks` the other ranks [serve](Shards::serve); else they gather the
    /// same names in the same order.
    pub fn by_name(&self, asks: bool) -> ByName {
        ByName { shards: self.clone(), gathered: None, asks }
    }

    /// Takes part in what rank 0 gathers of `models`, until it calls [`Shards::end_serving`] with the same models: it writes files
    /// of models whose parts other ranks have.
    ///
    /// # Errors
    /// As [`Shards::start_pass`].
    pub fn serve(models: &[&Self]) -> Result<()> {
        let Some(world) = serving_world(models) else { return Ok(()) };
        loop {
            let code = world.max_number(0.0)? as usize;
            let Some((id, number)) = code.checked_sub(1).map(|code| (code >> 32, code & 0xffff_ffff)) else {
                return Ok(());
            };
            let request = Request::from_number(number);
            let served = models.iter().find_map(|shards| {
                shards.with(|division| (division.id == id as u64).then(|| division.serve(request))).flatten()
            });
            served.unwrap_or_else(|| Err(unknown(code)))?;
        }
    }

    /// Ends [`Shards::serve`] on the other ranks.
    ///
    /// # Errors
    /// As [`Shards::start_pass`].
    pub fn end_serving(models: &[&Self]) -> Result<()> {
        serving_world(models).map_or(Ok(()), |world| world.max_number(0.0).map(drop))
    }

    /// Hands over this rank's moments of each trained part, so that they can be gathered.
    pub fn set_moments(&self, moments: impl IntoIterator<Item = [Tensor; 2]>) {
        self.with(|division| {
            let units = division.units.iter_mut().filter(|unit| unit.trained);
            units.zip(moments).for_each(|(unit, moments)| unit.state.moments = Some(moments));
        });
    }

    /// Returns both moments of the trained vector `index` whole, on the host; the other ranks serve.
    ///
    /// # Errors
    /// As [`Shards::start_pass`].
    pub fn whole_moments(&self, index: usize) -> Result<[Tensor; 2]> {
        self.finish_passes()?;
        self.with(|division| {
            let trained = division.units.iter().enumerate().filter(|(_, unit)| unit.trained);
            let Some((unit, _)) = trained.into_iter().nth(index) else { return Err(unknown(index)) };
            division.ask(Request::Moments(unit))?;
            division.units[unit].whole_moments(&division.world)
        })
        .unwrap_or_else(|| Err(unknown(index)))
    }

    /// Sets the moving average of divided parameters to the parameters. Returns whether the parameters are divided.
    pub fn start_average(&self) -> bool {
        self.with(|division| {
            let divided = division.stage.shards_parameters();
            for unit in division.units.iter_mut().filter(|unit| unit.trained && divided) {
                unit.state.average = unit.part.as_ref().map(Tensor::copy);
            }
            divided
        })
        .unwrap_or(false)
    }

    /// Moves the average towards the parameters: a <- a + (1 - beta) * (p - a).
    pub fn update_average(&self, beta: f64) {
        self.with(|division| {
            for unit in &mut division.units {
                if let (Some(average), Some(part)) = (&mut unit.state.average, &unit.part) {
                    let _ = average.g_add_(&((part - &*average) * (1.0 - beta)));
                }
            }
        });
    }

    /// Swaps the parameters and their average. With `asks`, for rank 0 while the others serve, they do too.
    ///
    /// # Errors
    /// As [`Shards::start_pass`].
    pub fn swap_average(&self, asks: bool) -> Result<()> {
        if asks {
            // Without, each rank swaps its own parts, in the middle of reading a checkpoint: another rank may have failed to.
            self.finish_passes()?;
        }
        self.with(|division| {
            if asks {
                division.ask(Request::Swap)?;
            }
            division.swap_average()
        })
        .unwrap_or(Ok(()))
    }

    /// The trained parameters by name, where each rank holds them whole (stages 0 to 2).
    pub fn whole_trained(&self) -> Vec<(String, Tensor)> {
        self.with(|division| {
            let units = division.units.iter().filter(|unit| unit.trained && !division.stage.shards_parameters());
            let named = |unit: &Unit| {
                let pairs = unit.slots.iter().zip(&unit.params);
                pairs.map(|(slot, param)| (slot.name.clone(), param.shallow_clone())).collect::<Vec<_>>()
            };
            units.flat_map(named).collect()
        })
        .unwrap_or_default()
    }

    /// The parts that this rank's optimizer updates; empty unless optimizer state is divided.
    pub fn trained_parts(&self) -> Vec<TrainedPart> {
        self.with(|division| {
            let (rank, size) = (division.world.rank() as i64, division.world.size() as i64);
            let parts = division.units.iter().filter(|unit| unit.trained);
            let part = |unit: &Unit| {
                let len = unit.len / size;
                let params = unit.part.as_ref()?.shallow_clone();
                let (start, decaying) = (rank * len, (unit.decaying - rank * len).clamp(0, len));
                Some(TrainedPart { params, decaying, start, slots: unit.slots.clone() })
            };
            parts.filter_map(part).collect()
        })
        .unwrap_or_default()
    }

    /// The ranks that the model is divided over; this process alone if it is not divided.
    pub fn world(&self) -> World {
        self.outer().unwrap_or_default()
    }

    /// Sums the gradients over all ranks, unless they are summed already.
    ///
    /// # Errors
    /// As [`Shards::start_pass`].
    pub fn reduce_gradients(&self) -> Result<()> {
        self.finish_passes()?;
        self.with(Division::reduce_gradients).unwrap_or(Ok(()))
    }

    /// Returns this rank's parts of the gradients, in the order of [`Shards::trained_parts`], after they are summed.
    ///
    /// # Errors
    /// As [`Shards::start_pass`].
    pub fn grad_parts(&self) -> Result<Vec<Tensor>> {
        self.reduce_gradients()?;
        let parts = self.with(|division| {
            let trained = division.units.iter().filter(|unit| unit.trained);
            trained.map(|unit| unit.grad_part(&division.world)).collect()
        });
        Ok(parts.unwrap_or_default())
    }

    /// Multiplies the gradients by `factor`.
    pub fn scale_gradients(&self, factor: f64) {
        self.with(|division| {
            division.units.iter_mut().for_each(|unit| unit.scale_gradients(factor));
        });
    }

    /// Clears the gradients.
    pub fn zero_gradients(&self) {
        self.with(|division| {
            let lent = division.stage.shards_gradients();
            division.reduced = false;
            division.units.iter_mut().for_each(|unit| unit.zero_gradients(lent));
            if lent {
                // The parts of the gradients, and the holes that layers' activations have left between them.
                tch_ext::release_memory();
            }
        });
    }

    /// Returns the sizes of the gradients that this rank keeps between passes, a vector per unit; none where they are sharded.
    pub fn gradient_sizes(&self) -> Vec<(usize, Kind)> {
        let sizes = |division: &mut Division| {
            let keeps = |unit: &&Unit| unit.trained && !division.stage.shards_gradients();
            division.units.iter().filter(keeps).map(|unit| (unit.len as usize, unit.kind)).collect()
        };
        self.with(sizes).unwrap_or_default()
    }

    /// Makes the vectors `grads`, which are zero and of [these sizes](Shards::gradient_sizes), the memory of the gradients.
    ///
    /// # Errors
    /// If libtorch refuses.
    pub fn use_gradients(&self, grads: Vec<Tensor>) -> Result<()> {
        self.with(|division| {
            let mut units = division.units.iter_mut().filter(|unit| unit.trained).zip(grads);
            units.try_for_each(|(unit, grads)| unit.use_gradients(grads))
        })
        .unwrap_or(Ok(()))
    }

    /// Frees the gradients that this rank keeps between passes; the next backward pass allocates new ones.
    ///
    /// # Errors
    /// If libtorch refuses.
    pub fn release_gradients(&self) -> Result<()> {
        self.with(|division| division.units.iter_mut().try_for_each(Unit::release_gradients)).unwrap_or(Ok(()))
    }

    /// Makes the parameters of all ranks those that each rank's optimizer has put into its part.
    ///
    /// # Errors
    /// As [`Shards::start_pass`].
    pub fn gather_stepped(&self) -> Result<()> {
        self.finish_passes()?;
        self.with(|division| {
            let world = division.world.clone();
            division.units.iter().filter(|unit| unit.trained).try_for_each(|unit| unit.gather_stepped(&world))
        })
        .unwrap_or(Ok(()))
    }

    /// Whether this rank has only a part of the parameter `name`, or nothing of it.
    pub fn divides(&self, name: &str) -> bool {
        let divides = |division: &mut Division| division.stage.shards_parameters() && division.unit_of(name).is_some();
        self.with(divides).unwrap_or(false)
    }

    /// Reads parameters of which ranks have parts, one at a time: `read` writes a parameter, by its name, into the tensor that it
    /// receives. `reads` selects the parameters.
    ///
    /// # Errors
    /// The errors of `read`.
    pub fn read_params(
        &self,
        reads: impl Fn(&str) -> bool,
        mut read: impl FnMut(&str, &Tensor) -> Result<()>,
    ) -> Result<()> {
        self.with(|division| {
            if !division.stage.shards_parameters() {
                return Ok(());
            }
            let rank = division.world.rank() as i64;
            let wanted = |unit: &&Unit| unit.slots.iter().any(|slot| reads(&slot.name));
            division.units.iter().filter(wanted).try_for_each(|unit| unit.read(rank, &reads, &mut read))
        })
        .unwrap_or(Ok(()))
    }
}

impl Division {
    fn releases(&self) -> bool {
        self.stage.shards_parameters() && self.gathered == 0
    }

    /// Number of a pass of this kind in announcements; above 0.
    fn code(&self, kind: PassKind) -> u64 {
        // Without an encoder a step is a forward pass, so that ranks which read prompts and ranks which decode run one together.
        let kind = match kind {
            PassKind::Backward => 1,
            PassKind::Step if self.layers[0] > 0 => 2,
            PassKind::Forward | PassKind::Step => 0,
        };
        3 * self.id + 1 + kind
    }

    /// Whether a pass of this kind has collectives.
    fn has_collectives(&self, kind: PassKind) -> bool {
        self.releases() || (self.stage.shards_gradients() && kind == PassKind::Backward)
    }

    /// The unit of the parameter `name`.
    fn unit_of(&self, name: &str) -> Option<usize> {
        self.units.iter().position(|unit| unit.slots.iter().any(|slot| slot.name == name))
    }

    /// Gathers the units of `place`, unless all ranks hold all units.
    fn gather(&mut self, place: Option<usize>) -> Result<()> {
        if !self.releases() {
            return Ok(());
        }
        let world = &self.world;
        self.units.iter_mut().filter(|unit| unit.layer == place).try_for_each(|unit| unit.gather(world))
    }

    /// Gathers the root's units, and starts to gather those of the first layer of a pass of this kind.
    fn start_pass(&mut self, kind: PassKind) -> Result<()> {
        self.gather(None)?;
        if kind == PassKind::Backward {
            self.lend_gradients(None)?;
        }
        self.prefetch(self.first_layer(kind))
    }

    /// The layer that a pass of this kind begins with.
    fn first_layer(&self, kind: PassKind) -> usize {
        if kind == PassKind::Step { self.layers[0] } else { 0 }
    }

    /// Gathers the units of `layer`, and starts to gather those of the next; or keeps those of `layer`, if it comes next too.
    fn gather_layer(&mut self, layer: usize, direction: Direction) -> Result<()> {
        self.gather(Some(layer))?;
        self.look_ahead(layer, direction)
    }

    /// Starts to gather the layer that comes after `layer` in this direction, or keeps `layer`, which comes again.
    fn look_ahead(&mut self, layer: usize, direction: Direction) -> Result<()> {
        match direction {
            Direction::ForwardAndBack if layer + 1 == self.layers[1] => self.keep(layer),
            Direction::Forward | Direction::ForwardAndBack => self.prefetch(layer + 1)?,
            Direction::Backward if layer > 0 => self.prefetch(layer - 1)?,
            Direction::Backward => {}
        }
        Ok(())
    }

    /// Starts to gather the units of `layer`, if there is such a layer.
    fn prefetch(&mut self, layer: usize) -> Result<()> {
        if !self.holds_ahead() {
            return Ok(());
        }
        let world = &self.world;
        self.units.iter_mut().filter(|unit| unit.layer == Some(layer)).try_for_each(|unit| unit.prefetch(world))
    }

    /// Keeps the units of `layer`, which are gathered, until they are gathered the next time.
    fn keep(&mut self, layer: usize) {
        if self.holds_ahead() {
            self.units.iter_mut().filter(|unit| unit.layer == Some(layer)).for_each(Unit::keep);
        }
    }

    /// Whether a layer has memory before its pass. One rank copies: ahead of time that would take memory and save little.
    fn holds_ahead(&self) -> bool {
        self.releases() && self.world.size() > 1
    }

    fn release(&mut self, place: Option<usize>) {
        if self.releases() {
            self.units.iter_mut().filter(|unit| unit.layer == place).for_each(Unit::release);
        }
    }

    /// Provides memory for the gradients of `place`, or of all units at once where they are whole on every rank.
    fn lend_gradients(&mut self, place: Option<usize>) -> Result<()> {
        if !self.stage.shards_gradients() {
            return self
                .units
                .iter_mut()
                .filter(|unit| unit.trained)
                .try_for_each(|unit| unit.keep_gradients().map(drop));
        }
        if place.is_none() {
            self.allocate_grad_parts();
        }
        let mut units = self.units.iter_mut().filter(|unit| unit.trained && unit.layer == place);
        units.try_for_each(Unit::lend_gradients)
    }

    /// Provides memory for this rank's parts of the gradients, unless they have some: one vector for all units, as small pieces
    /// between the layers' activations would leave holes in the heap.
    fn allocate_grad_parts(&mut self) {
        let size = self.world.size() as i64;
        let mut trained: Vec<&mut Unit> = self.units.iter_mut().filter(|unit| unit.trained).collect();
        let Some(device) = trained.first().filter(|unit| unit.grad_part.is_none()).map(|unit| unit.device) else {
            return;
        };
        let len = trained.iter().map(|unit| unit.len / size).sum::<i64>();
        let all = Tensor::zeros([len], (Kind::Float, device));
        let mut start = 0;
        for unit in &mut trained {
            let len = unit.len / size;
            unit.grad_part = Some(all.narrow(0, start, len));
            start += len;
        }
    }

    /// Starts to reduce the gradients of `place`, after the reduction before it is done: at most two layers have gradients at a time.
    fn reduce_lent(&mut self, place: Option<usize>) -> Result<()> {
        if !self.stage.shards_gradients() {
            return Ok(());
        }
        let world = &self.world;
        self.units.iter_mut().try_for_each(|unit| unit.finish_reduction(world))?;
        let mut units = self.units.iter_mut().filter(|unit| unit.trained && unit.layer == place);
        units.try_for_each(|unit| {
            unit.start_reduction(world)?;
            // One rank has the sum at once, and its gradients need no more memory.
            if world.size() == 1 { unit.finish_reduction(world) } else { Ok(()) }
        })
    }

    /// Waits for all collectives in progress, also after one has failed; returns the first error.
    fn settle(&mut self) -> Result<()> {
        let world = &self.world;
        self.units.iter_mut().map(|unit| unit.settle(world)).fold(Ok(()), Result::and)
    }

    fn reduce_gradients(&mut self) -> Result<()> {
        if self.reduced || self.stage.shards_gradients() {
            return Ok(());
        }
        self.reduced = true;
        let (world, whole) = (&self.world, !self.stage.shards_optimizer());
        let mut units = self.units.iter_mut().filter(|unit| unit.trained);
        units.try_for_each(|unit| if whole { unit.sum_whole(world) } else { unit.reduce_whole(world) })
    }

    /// Asks the other ranks, which serve, for something.
    fn ask(&self, request: Request) -> Result<()> {
        if self.world.size() == 1 {
            return Ok(());
        }
        let code = ((self.id as usize) << 32) + request.number() + 1;
        self.world.max_number(code as f64).map(drop)
    }

    fn serve(&mut self, request: Request) -> Result<()> {
        match request {
            Request::Params(unit) => {
                self.units[unit].gather(&self.world)?;
                self.units[unit].release();
                Ok(())
            }
            Request::Moments(unit) => self.units[unit].whole_moments(&self.world).map(drop),
            Request::Swap => self.swap_average(),
        }
    }

    fn swap_average(&mut self) -> Result<()> {
        let world = &self.world;
        for unit in &mut self.units {
            if let (Some(average), Some(part)) = (&mut unit.state.average, &mut unit.part) {
                std::mem::swap(average, part);
                unit.gather_stepped(world)?;
            }
        }
        Ok(())
    }

    /// The collectives of a pass that another rank announced, in the order of that rank.
    fn idle_pass(&mut self, kind: PassKind) -> Result<()> {
        let passed = self.idle_layers(kind);
        let settled = self.settle();
        self.release(None);
        passed.and(settled)
    }

    fn idle_layers(&mut self, kind: PassKind) -> Result<()> {
        self.start_pass(kind)?;
        let is_backward = kind == PassKind::Backward;
        let direction = if is_backward { Direction::ForwardAndBack } else { Direction::Forward };
        for layer in self.first_layer(kind)..self.layers[1] {
            self.gather_layer(layer, direction)?;
            self.release(Some(layer));
        }
        if is_backward {
            for layer in (0..self.layers[1]).rev() {
                self.gather_layer(layer, Direction::Backward)?;
                self.lend_gradients(Some(layer))?;
                self.reduce_lent(Some(layer))?;
                self.release(Some(layer));
            }
            self.reduce_lent(None)?;
        }
        Ok(())
    }
}

impl RootGuard {
    /// Ends a backward pass: reduces the root's gradients, and waits for all reductions.
    ///
    /// # Errors
    /// As [`Shards::start_pass`].
    pub fn finish_backward(self) -> Result<()> {
        let reduced = self.0.with(|division| {
            division.reduce_lent(None)?;
            division.settle()
        });
        reduced.unwrap_or(Ok(()))
    }
}

impl Drop for RootGuard {
    fn drop(&mut self) {
        self.0.with(|division| {
            // Something is in progress only if the pass has failed, which is reported, or has ended early.
            let _ = division.settle();
            division.release(None);
        });
    }
}

impl Drop for LayerGuard {
    fn drop(&mut self) {
        self.0.with(|division| division.release(Some(self.1)));
    }
}

impl Drop for AllGuard {
    fn drop(&mut self) {
        self.0.with(|division| {
            division.gathered -= 1;
            let releases = division.releases();
            for unit in division.units.iter_mut().filter(|_| releases) {
                unit.view_part(&division.world, false);
                unit.release();
            }
        });
    }
}

impl ByName {
    /// Gathers the unit of the parameter `name` until another unit is gathered or the guard is dropped. Parameters that are not
    /// divided are there in any case.
    ///
    /// # Errors
    /// As [`Shards::start_pass`].
    pub fn gather(&mut self, name: &str) -> Result<()> {
        let wanted = self.shards.with(|division| {
            let divided = division.stage.shards_parameters();
            division.unit_of(name).filter(|_| divided)
        });
        let wanted = wanted.flatten();
        if wanted == self.gathered {
            return Ok(());
        }
        self.release();
        let Some(index) = wanted else { return Ok(()) };
        self.shards.finish_passes()?;
        let gathered = self.shards.with(|division| {
            if self.asks {
                division.ask(Request::Params(index))?;
            }
            division.units[index].gather(&division.world)
        });
        gathered.unwrap_or(Ok(()))?;
        self.gathered = wanted;
        Ok(())
    }

    fn release(&mut self) {
        let gathered = self.gathered.take();
        self.shards.with(|division| gathered.iter().for_each(|&index| division.units[index].release()));
    }
}

impl Drop for ByName {
    fn drop(&mut self) {
        self.release();
    }
}

impl Sharded for Divided {
    fn take_part(&self, code: u64) -> Option<Result<()>> {
        let mut division = self.lock();
        let division = division.as_mut()?;
        let kinds = [PassKind::Forward, PassKind::Backward, PassKind::Step];
        let kind = kinds.into_iter().find(|&kind| division.code(kind) == code)?;
        Some(division.idle_pass(kind))
    }
}

/// The error of a request that no model of this rank knows.
fn unknown(code: usize) -> Error {
    Error::Run(format!("sharded models: a part that this rank does not know (number {code}): a bug"))
}

/// The ranks that serve while rank 0 writes `models`, if it needs them.
fn serving_world(models: &[&Shards]) -> Option<World> {
    let mut worlds = models.iter().filter_map(|shards| {
        shards.with(|division| division.stage.shards_optimizer().then(|| division.outer.clone())).flatten()
    });
    worlds.find(|world| world.size() > 1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rlhf_base::dist::as_two_ranks;
    use std::time::{Duration, Instant};

    /// Lengths of the parameters: that of the root, then those of each layer. The units of no two have the same length, so a collective
    /// that a rank calls out of order fails.
    const LENS: [i64; 6] = [300, 1000, 70, 5000, 40_000, 200];

    /// Several pieces of a collective on the CPU, of which the last is shorter.
    const LARGE: [i64; 4] = [300, 9_000_001, 70, 200];

    /// A model whose root and layers have one parameter each.
    struct Model {
        shards: Shards,
        params: Vec<Param>,
    }

    /// The numbers of the parameter `index`, `[len]` f32.
    fn numbers(index: usize, len: i64) -> Tensor {
        Tensor::arange(len, (Kind::Float, tch::Device::Cpu)) + index as f64
    }

    /// The gradient of the parameter `index` in a pass of this weight, `[len]` f32; its sums are rounded.
    fn gradient(index: usize, len: i64, weight: f64) -> Tensor {
        numbers(index, len).sin() * weight
    }

    impl Model {
        fn new(world: &World, stage: ZeroStage, lens: &[i64]) -> Self {
            Self::with_encoder(world, stage, lens, 0)
        }

        /// A model of which the first `encoder_layers` layers are an encoder's.
        fn with_encoder(world: &World, stage: ZeroStage, lens: &[i64], encoder_layers: usize) -> Self {
            let param = |(index, &len): (usize, &i64)| Param {
                name: if index == 0 { "embedding".into() } else { format!("layers.{}", index - 1) },
                tensor: numbers(index, len).set_requires_grad(true),
                decay: true,
                embedding: false,
                fixed: false,
            };
            let params: Vec<Param> = lens.iter().enumerate().map(param).collect();
            let shards = Shards::default();
            let layer_of = |name: &str| name.strip_prefix("layers.")?.parse().ok();
            shards.divide((world, stage), &params, [encoder_layers, lens.len() - 1], layer_of);
            Self { shards, params }
        }

        fn layers(&self) -> usize {
            self.params.len() - 1
        }

        fn len(&self, index: usize) -> i64 {
            self.params[index].tensor.size()[0]
        }

        #[track_caller]
        fn is_gathered(&self, index: usize) {
            assert!(self.params[index].tensor.detach() == numbers(index, self.len(index)), "parameter {index}");
        }

        /// Numbers of gathers and of reductions in progress.
        fn in_progress(&self) -> [usize; 2] {
            let count = |division: &mut Division| {
                let units = &division.units;
                [
                    units.iter().filter(|unit| unit.is_prefetched()).count(),
                    units.iter().filter(|unit| unit.is_reduced()).count(),
                ]
            };
            self.shards.with(count).unwrap()
        }

        /// Number of holders of the parameter `index`.
        fn holders(&self, index: usize) -> usize {
            self.shards.with(|division| division.units[index].holders).unwrap()
        }

        /// Nothing is in progress, and no layer has memory that it has only in a pass.
        #[track_caller]
        fn is_at_rest(&self) {
            assert_eq!(self.in_progress(), [0, 0]);
            let holders = self.shards.with(|division| division.units.iter().map(|unit| unit.holders).sum::<usize>());
            assert_eq!(holders, Some(0));
        }

        fn add_gradient(&self, index: usize, weight: f64) {
            let _ = self.params[index].tensor.grad().g_add_(&gradient(index, self.len(index), weight));
        }

        /// A forward and backward pass as the decoder's, with gradients of this weight. It fails in the backward pass of the layer `fails_in`, or
        /// of the head, if there is no such layer.
        fn backward(&self, weight: f64, fails_in: Option<usize>) -> Result<()> {
            let prefetches = usize::from(self.shards.are_params_divided());
            let root = self.shards.start_pass(PassKind::Backward)?;
            self.is_gathered(0);
            // While the embeddings are computed.
            assert_eq!(self.in_progress(), [prefetches, 0]);
            for layer in 0..self.layers() {
                let _layer = self.shards.layer(layer, Direction::ForwardAndBack)?;
                self.is_gathered(layer + 1);
                assert_eq!(self.in_progress(), [prefetches * usize::from(layer + 1 < self.layers()), 0]);
            }
            // The last layer has stayed.
            self.is_gathered(self.layers());
            assert_eq!(self.holders(self.layers()), prefetches);
            if fails_in == Some(self.layers()) {
                return Err(Error::Run("no memory".into()));
            }
            self.add_gradient(0, weight);
            for layer in (0..self.layers()).rev() {
                let _layer = self.shards.layer(layer, Direction::Backward)?;
                self.shards.lend_gradients(Some(layer))?;
                let reductions = usize::from(layer + 1 < self.layers());
                assert_eq!(self.in_progress(), [prefetches * usize::from(layer > 0), reductions]);
                assert_eq!(self.holders(layer + 1), prefetches);
                if fails_in == Some(layer) {
                    return Err(Error::Run("no memory".into()));
                }
                self.is_gathered(layer + 1);
                self.add_gradient(layer + 1, weight);
                self.shards.reduce_layer(layer)?;
            }
            root.finish_backward()
        }

        /// A forward pass that ends after this many layers.
        fn forward(&self, layers: usize) -> Result<()> {
            let _root = self.shards.start_pass(PassKind::Forward)?;
            (0..layers).try_for_each(|layer| self.shards.layer(layer, Direction::Forward).map(drop))
        }
    }

    /// The sums over both ranks of the gradients of passes of these weights, reduced one after another: each parameter's part of this rank.
    fn expected_parts(world: &World, lens: &[i64], passes: &[[f64; 2]]) -> Vec<Tensor> {
        let part = |(index, &len): (usize, &i64)| {
            let sum = Tensor::zeros([(len as u64).next_multiple_of(128) as i64], (Kind::Float, tch::Device::Cpu));
            for weights in passes {
                let mut pass_sum = gradient(index, len, weights[world.rank()]);
                world.sum(&mut pass_sum).unwrap();
                let _ = sum.narrow(0, 0, len).g_add_(&pass_sum);
            }
            sum.chunk(2, 0).swap_remove(world.rank())
        };
        lens.iter().enumerate().map(part).collect()
    }

    #[test]
    fn sums_of_gradients_have_the_bits_of_reductions_one_after_another_for_any_number_of_passes() {
        for (stage, lens) in [
            (ZeroStage::Stage2, LENS.as_slice()),
            (ZeroStage::Stage3, &LENS),
            (ZeroStage::Stage2, &LARGE),
            (ZeroStage::Stage3, &LARGE),
        ] {
            // Rank 0 has no third pass, and takes part in that of rank 1.
            let passes = [[0.3, 1.7], [1.1, 0.9], [0.0, 0.7]];
            as_two_ranks(|world| {
                let model = Model::new(&world, stage, lens);
                for weights in &passes[..2 + world.rank()] {
                    model.backward(weights[world.rank()], None).unwrap();
                    model.is_at_rest();
                }
                let parts = model.shards.grad_parts().unwrap();
                model.is_at_rest();
                assert!(parts == expected_parts(&world, lens, &passes), "rank {} at stage {stage}", world.rank());
            });
        }
    }

    #[test]
    fn ranks_that_compute_at_different_speeds_call_collectives_in_one_order() {
        as_two_ranks(|world| {
            let models = [ZeroStage::Stage3, ZeroStage::Stage2].map(|stage| Model::new(&world, stage, &LENS));
            for pass in 0..6u64 {
                // Now one rank is ahead, now the other.
                std::thread::sleep(Duration::from_millis(5 * ((pass + world.rank() as u64) % 2)));
                models.iter().for_each(|model| model.backward(1.0, None).unwrap());
                models[0].forward(models[0].layers()).unwrap();
            }
            world.finish_passes().unwrap();
            models.iter().for_each(Model::is_at_rest);
            let expected = expected_parts(&world, &LENS, &[[1.0; 2]; 6]);
            for model in &models {
                assert!(model.shards.grad_parts().unwrap() == expected);
            }
        });
    }

    #[test]
    fn a_pass_that_ends_early_leaves_nothing_in_progress() {
        as_two_ranks(|world| {
            let model = Model::new(&world, ZeroStage::Stage3, &LENS);
            for layers in 0..model.layers() {
                model.forward(layers).unwrap();
                model.is_at_rest();
            }
            // All ranks find the same error, as that of a program that they share.
            for fails_in in [2, model.layers()] {
                assert!(model.backward(1.0, Some(fails_in)).is_err());
                model.is_at_rest();
                model.shards.zero_gradients();
            }
            model.backward(1.0, None).unwrap();
            assert!(model.shards.grad_parts().unwrap() == expected_parts(&world, &LENS, &[[1.0; 2]]));
        });
    }

    #[test]
    fn a_pass_begins_with_the_gather_of_the_first_layer_that_it_computes() {
        as_two_ranks(|world| {
            let encoder_layers = 2;
            let model = Model::with_encoder(&world, ZeroStage::Stage3, &LENS, encoder_layers);
            for (kind, first) in [(PassKind::Forward, 0), (PassKind::Backward, 0), (PassKind::Step, encoder_layers)] {
                let root = model.shards.start_pass(kind).unwrap();
                assert_eq!((model.in_progress(), model.holders(first + 1)), ([1, 0], 1), "{kind:?}");
                drop(root);
                model.is_at_rest();
            }
            // Rank 0 takes part in a step of rank 1.
            if world.rank() == 1 {
                let _root = model.shards.start_pass(PassKind::Step).unwrap();
                for layer in encoder_layers..model.layers() {
                    let _layer = model.shards.layer(layer, Direction::Forward).unwrap();
                    model.is_gathered(layer + 1);
                }
            }
            world.finish_passes().unwrap();
            model.is_at_rest();
        });
    }

    #[test]
    fn a_rank_that_fails_within_a_pass_ends_the_other_with_its_error() {
        for stage in [ZeroStage::Stage2, ZeroStage::Stage3] {
            let began = Instant::now();
            let errors = as_two_ranks(|world| {
                let model = Model::new(&world, stage, &LENS);
                model.backward(1.0, None).unwrap();
                let error = model.backward(1.0, (world.rank() == 1).then_some(2)).unwrap_err().to_string();
                assert_eq!(model.in_progress(), [0, 0]);
                world.leave(&error);
                error
            });
            assert_eq!(errors, ["rank 1: no memory", "no memory"]);
            assert!(began.elapsed() < Duration::from_secs(20), "{:?}", began.elapsed());
        }
    }

    #[test]
    fn one_rank_gathers_nothing_ahead_of_time_and_keeps_nothing() {
        let model = Model::new(&World::single(), ZeroStage::Stage3, &LENS);
        let _root = model.shards.start_pass(PassKind::Forward).unwrap();
        assert_eq!((model.in_progress(), model.holders(1)), ([0, 0], 0));
        let layer = model.shards.layer(1, Direction::Forward).unwrap();
        model.is_gathered(2);
        assert_eq!(model.in_progress(), [0, 0]);
        drop(layer);
        let last = model.layers();
        drop(model.shards.layer(last - 1, Direction::ForwardAndBack).unwrap());
        assert_eq!(model.holders(last), 0);
    }
}
