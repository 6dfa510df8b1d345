//! An actor that learns from lessons: what imitation and policy iteration have in common.
//!
//! They differ in what a lesson is, where lessons come from, and what the loss over them is: a [`Method`]. Its configuration
//! is the method.

use std::path::Path;
use std::time::Instant;

use burn::optim::{AdamConfig, ModuleOptimizer};
use burn::tensor::{Device, Tensor};
use plimsoll_env::environment::{Environment, Observation};
use plimsoll_runtime::network::{NetworkWeights, Normaliser, WeightsError};
use rand::seq::SliceRandom;
use serde::Serialize;

use crate::average::averaged;
use crate::config::{ConfigError, Hyperparameters, annealed};
use crate::export::network_weights;
use crate::gradients::{Diverged, clip_norm, of_shards};
use crate::learner::{Episodes, Learner, Progress, StartError, TrainError, UpdateReport};
use crate::model::Actor;
use crate::seeds::{Stream, generator};
use crate::spread::FeatureSpread;
use crate::training_state::{self, Header, Kind, SavedStateError};

/// The hyperparameters that all methods have.
pub struct Passes {
    pub(crate) updates: usize,
    pub(crate) hidden: usize,
    pub(crate) normaliser_updates: usize,
    pub(crate) learning_rate: f64,
    pub(crate) epochs: usize,
    pub(crate) minibatches: usize,
    pub(crate) gradient_norm_max: f64,
}

impl Passes {
    /// Adam's step size at an update, counted from 0.
    fn learning_rate_at(&self, update: usize) -> f64 {
        annealed(self.learning_rate, update, self.updates)
    }
}

/// What an actor is taught, by its hyperparameters.
pub trait Method: Hyperparameters + Clone + PartialEq + Serialize + Sync {
    /// What is learned from.
    type Lesson: Sync;

    /// Which training states are of this method.
    const KIND: Kind;

    /// Those that all methods have.
    fn passes(&self) -> Passes;

    /// The observation that a lesson is about.
    fn observation(lesson: &Self::Lesson) -> &Observation;

    /// The mean loss over lessons, `[1]`.
    fn loss(actor: &Actor, lessons: &[&Self::Lesson], normaliser: &Normaliser, device: &Device) -> Tensor<1>;
}

/// Learns one policy from lessons. Its steady weights are an average of those so far.
pub struct Student<M> {
    pub(crate) header: Header<M>,
    device: Device,
    actor: Actor,
    optimizer: ModuleOptimizer,
}

/// What the passes of an update make of an actor.
struct Improved {
    actor: Actor,
    optimizer: ModuleOptimizer,
    /// The mean over its steps.
    loss: f64,
    /// Likewise.
    gradient_norm: f64,
}

impl<M: Method> Student<M> {
    /// Begins a training run, with the first weights that proximal policy optimisation of the same seed would have.
    pub fn new(config: M, seed: u64) -> Result<Self, ConfigError> {
        config.validate()?;
        let device = Device::flex().autodiff();
        let actor = Actor::new(config.passes().hidden, &mut generator(seed, Stream::Weights, 0, 0), &device);
        let optimizer = AdamConfig::new().init();
        Ok(Student { header: Header::new(config, seed), device, actor, optimizer })
    }

    /// Continues a saved training run, which must have been begun with the same hyperparameters and seed.
    pub fn resume(path: impl AsRef<Path>, config: &M, seed: u64) -> Result<Self, SavedStateError> {
        let path = path.as_ref();
        let fresh = Self::new(config.clone(), seed).map_err(|error| SavedStateError::unusable(path, error))?;
        let (header, actor, optimizer) =
            training_state::read(path, M::KIND, (config, seed), fresh.actor, fresh.optimizer)?;
        Ok(Student { header, device: fresh.device, actor, optimizer })
    }

    /// Ends an update that `started` then: learns from the lessons of its episodes.
    pub(crate) fn learn<E: Environment>(
        &mut self,
        started: Instant,
        lessons: &[M::Lesson],
        episodes: &Episodes,
        details: Vec<(&'static str, f64)>,
    ) -> Result<UpdateReport, TrainError<E::Error>> {
        let (passes, update) = (self.header.config.passes(), self.header.progress.updates);
        let mut spread = self.header.spread.clone();
        if update < passes.normaliser_updates {
            lessons.iter().for_each(|lesson| spread.absorb(&M::observation(lesson).features));
        }
        let Improved { actor, optimizer, loss, gradient_norm } =
            self.improve(lessons, &spread.normaliser()).map_err(|Diverged| TrainError::Loss { update: update + 1 })?;
        // While the normaliser changes, weights mean something else each time.
        let before = self.header.progress.average.as_ref().filter(|_| update >= passes.normaliser_updates);
        let average = averaged(before, network_weights(&actor, spread.normaliser())?)?;
        (self.actor, self.optimizer) = (actor, optimizer);
        self.header.spread = spread;
        self.header.progress.average = Some(average);
        let learned = [
            ("cross_entropy", loss),
            ("gradient_norm", gradient_norm),
            ("learning_rate", passes.learning_rate_at(update)),
        ];
        let details = learned.into_iter().chain(details).collect();
        Ok(self.header.progress.count(started, episodes, details))
    }

    /// Makes every pass over the lessons.
    fn improve(&self, lessons: &[M::Lesson], normaliser: &Normaliser) -> Result<Improved, Diverged> {
        let Header { config, seed, progress, .. } = &self.header;
        let passes = config.passes();
        let (mut actor, mut optimizer) = (self.actor.clone(), self.optimizer.clone());
        let mut order: Vec<&M::Lesson> = lessons.iter().collect();
        let size = order.len().div_ceil(passes.minibatches).max(1);
        let (mut losses, mut norms, mut steps) = (0.0, 0.0, 0.0);
        for epoch in 0..passes.epochs {
            order.shuffle(&mut generator(*seed, Stream::Order, progress.updates, epoch));
            for minibatch in order.chunks(size) {
                let loss = |actor: &Actor, shard: &[&M::Lesson]| (M::loss(actor, shard, normaliser, &self.device), ());
                let (mut gradients, loss, _) = of_shards(&actor, &self.device, minibatch, loss)?;
                let norm = clip_norm(&mut gradients, &actor, passes.gradient_norm_max)?;
                actor = optimizer.step(passes.learning_rate_at(progress.updates), actor, gradients);
                (losses, norms, steps) = (losses + loss, norms + norm, steps + 1.0);
            }
        }
        let steps = f64::max(steps, 1.0);
        Ok(Improved { actor, optimizer, loss: losses / steps, gradient_norm: norms / steps })
    }
}

impl<M: Method> Learner for Student<M> {
    fn hyperparameters(&self) -> serde_json::Value {
        serde_json::to_value(&self.header.config).expect("a flat table of numbers")
    }

    fn updates(&self) -> usize {
        self.header.config.passes().updates
    }

    fn progress(&self) -> &Progress {
        &self.header.progress
    }

    fn progress_mut(&mut self) -> &mut Progress {
        &mut self.header.progress
    }

    fn weights(&self) -> Result<NetworkWeights, WeightsError> {
        network_weights(&self.actor, self.header.spread.normaliser())
    }

    fn start_from(&mut self, weights: &NetworkWeights) -> Result<(), StartError> {
        self.actor = Actor::of(weights, self.header.config.passes().hidden, &self.device)?;
        self.header.spread = FeatureSpread::given(weights.normaliser().clone());
        Ok(())
    }

    fn hide(&mut self, columns: &[usize]) {
        self.header.spread.hide(columns);
    }

    fn save(&self, path: &Path) -> Result<(), SavedStateError> {
        training_state::write(path, M::KIND, &self.header, &self.actor, &self.optimizer)
    }
}
