//! Observes a training loop, and does nothing about it: what that costs, the benches of this crate and of `plimsoll-env` tell.
//!
//! A census decides nothing and evicts nothing. It may keep recipes as an executor would whose plan recomputes everything.

use std::sync::{Arc, Mutex, MutexGuard};

use super::deaths::Deaths;
use super::session::{Observer, Session, SessionError, Wish};
use super::shim::{self, Entry, RawOperator, Recipe};
use crate::locks::lock;

/// Is told of operators.
pub struct Census {
    session: Session,
    observing: Arc<Observing>,
}

/// The recipes that there are.
struct Kept {
    /// By the shim's number of the first storage that the operator made.
    recipes: Vec<Option<Recipe>>,
    deaths: Deaths,
    freed: Vec<Entry>,
}

struct Observing {
    keeps_recipes: bool,
    kept: Mutex<Kept>,
}

impl Census {
    /// An empty census. One that `keeps_recipes` has the recipe of every operator recorded, and keeps it for as long as
    /// what the operator made.
    pub fn new(session: Session, keeps_recipes: bool) -> Self {
        let kept = Kept { recipes: Vec::new(), deaths: Deaths::new(), freed: Vec::new() };
        Census { session, observing: Arc::new(Observing { keeps_recipes, kept: Mutex::new(kept) }) }
    }

    /// Is told of the operators of `body`.
    pub fn observe<R>(&mut self, body: impl FnOnce() -> R) -> Result<R, SessionError> {
        let listening = self.session.listen(Arc::clone(&self.observing) as Arc<dyn Observer>)?;
        let result = body();
        drop(listening);
        self.observing.lock().absorb_freed();
        Ok(result)
    }

    /// Recipes that are kept now, and the bytes that they take.
    pub fn recipe_bytes(&self) -> (usize, usize) {
        let kept = self.observing.lock();
        let recipes = kept.recipes.iter().flatten();
        (recipes.clone().count(), recipes.map(Recipe::bytes).sum())
    }

    /// Bytes that the shim's table of storages takes.
    pub fn entry_bytes(&self) -> usize {
        shim::entry_bytes()
    }
}

impl Observing {
    fn lock(&self) -> MutexGuard<'_, Kept> {
        lock(&self.kept)
    }
}

impl Kept {
    fn absorb_freed(&mut self) {
        let Kept { recipes, deaths, freed } = self;
        deaths.tell(freed, |entry| drop(recipes.get_mut(entry.index()).map(Option::take)));
    }
}

impl Observer for Observing {
    fn before(&self, _operator: &RawOperator) -> Result<Wish, String> {
        Ok(Wish { recipe: self.keeps_recipes, watch: false, times: false })
    }

    fn after(&self, operator: &RawOperator) {
        let mut kept = self.lock();
        // Before a recipe takes the place of what a storage of the same number left behind.
        kept.absorb_freed();
        if let Some(recipe) = operator.take_recipe()
            && let Some(created) = operator.created().first()
        {
            let index = created.entry.index();
            if kept.recipes.len() <= index {
                kept.recipes.resize_with(index + 1, || None);
            }
            kept.recipes[index] = Some(recipe);
        }
    }

    fn failed(&self, _operator: &RawOperator) {}
}
