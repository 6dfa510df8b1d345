//! Counts the operators of a training loop: which there are, and which of them cannot be rerun.
//!
//! A census decides nothing and evicts nothing. It keeps recipes as an executor would whose plan recomputes everything,
//! so it also shows what observing costs at the most: benches/interceptor.rs.

use std::sync::{Arc, Mutex, MutexGuard};

use super::session::{Observer, Session, SessionError, Wish, operator_name};
use super::shim::{self, Entry, RawOperator, Recipe};
use crate::locks::lock;

/// What a census counted of one operator.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tally {
    /// Its name, such as `aten::mm`.
    pub operator: String,
    /// How often it ran.
    pub calls: u64,
    /// How often it could not have been rerun.
    pub not_replayable: u64,
    /// Why not, the last time.
    pub why: Option<&'static str>,
}

#[derive(Clone, Copy, Default)]
struct Count {
    calls: u64,
    not_replayable: u64,
    why: Option<&'static str>,
}

/// Counts operators.
pub struct Census {
    session: Session,
    counting: Arc<Counting>,
}

/// What a census has counted so far.
#[derive(Default)]
struct Counted {
    /// By the shim's number of the name.
    counts: Vec<Count>,
    /// By the shim's number of the first storage that the operator made.
    recipes: Vec<Option<Recipe>>,
    freed: Vec<Entry>,
    recipes_alive: usize,
}

struct Counting {
    keeps_recipes: bool,
    counted: Mutex<Counted>,
}

impl Census {
    /// An empty census. One that `keeps_recipes` has the recipe of every operator recorded, and keeps it for as long as
    /// what the operator made.
    pub fn new(session: Session, keeps_recipes: bool) -> Self {
        Census { session, counting: Arc::new(Counting { keeps_recipes, counted: Mutex::default() }) }
    }

    /// Counts the operators of `body`.
    pub fn observe<R>(&mut self, body: impl FnOnce() -> R) -> Result<R, SessionError> {
        let listening = self.session.listen(Arc::clone(&self.counting) as Arc<dyn Observer>)?;
        let result = body();
        drop(listening);
        self.counting.lock().absorb_freed();
        Ok(result)
    }

    /// What was counted, by name.
    pub fn tallies(&self) -> Vec<Tally> {
        let counted = self.counting.lock();
        let mut tallies: Vec<Tally> = (0u32..)
            .zip(&counted.counts)
            .filter(|(_, count)| count.calls > 0)
            .map(|(name, count)| Tally {
                operator: operator_name(name),
                calls: count.calls,
                not_replayable: count.not_replayable,
                why: count.why,
            })
            .collect();
        tallies.sort_by(|a, b| a.operator.cmp(&b.operator));
        tallies
    }

    /// Recipes that are kept now, and the bytes that they take.
    pub fn recipe_bytes(&self) -> (usize, usize) {
        let counted = self.counting.lock();
        (counted.recipes_alive, counted.recipes.iter().flatten().map(Recipe::bytes).sum())
    }

    /// Bytes that the shim's table of storages takes.
    pub fn entry_bytes(&self) -> usize {
        shim::entry_bytes()
    }
}

impl Counting {
    fn lock(&self) -> MutexGuard<'_, Counted> {
        lock(&self.counted)
    }
}

impl Counted {
    fn absorb_freed(&mut self) {
        shim::take_freed(&mut self.freed);
        for entry in self.freed.drain(..) {
            if let Some(recipe) = self.recipes.get_mut(entry.index()) {
                self.recipes_alive -= usize::from(recipe.take().is_some());
            }
            shim::forget(entry);
        }
    }
}

impl Observer for Counting {
    fn before(&self, _operator: &RawOperator) -> Result<Wish, String> {
        Ok(Wish { recipe: self.keeps_recipes, watch: false, times: false })
    }

    fn after(&self, operator: &RawOperator) {
        let mut counted = self.lock();
        let counted = &mut *counted;
        // Before a recipe takes the place of what a storage of the same number left behind.
        counted.absorb_freed();
        let name = operator.name as usize;
        if counted.counts.len() <= name {
            counted.counts.resize(name + 1, Count::default());
        }
        let count = &mut counted.counts[name];
        count.calls += 1;
        if let Some(why) = operator.not_replayable() {
            count.not_replayable += 1;
            count.why = Some(why);
        }
        if let Some(recipe) = operator.take_recipe()
            && let Some(created) = operator.created().first()
        {
            let index = created.entry.index();
            if counted.recipes.len() <= index {
                counted.recipes.resize_with(index + 1, || None);
            }
            counted.recipes_alive += usize::from(counted.recipes[index].replace(recipe).is_none());
        }
    }

    fn failed(&self, _operator: &RawOperator) {}
}
