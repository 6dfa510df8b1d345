//! Runs a program under a budget and evicts when bytes run out (DTR, with its eager eviction).
//!
//! Which storage goes is the heuristic's affair.

use super::heuristic::{Heuristic, lowest};
use super::pool::Pool;
use super::program::{CallId, Program, SeatId, Step, TensorId};
use super::walk::{Direction, Walk};
use super::{OnlineRun, Outcome};

/// Where a storage is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Place {
    /// On the device.
    Present,
    /// Nowhere, until something asks for it; or not computed yet.
    Evicted,
    /// Nowhere, for good: a root that the program let go of.
    Gone,
}

/// What a heuristic may know of a storage.
#[derive(Clone, Copy, Debug)]
pub(super) struct Seat {
    /// Time of the operators that made its tensors, the views among them.
    pub(super) cost_ns: u64,
    pub(super) bytes: u64,
    /// When it was last asked for.
    pub(super) accessed_ns: u64,
    pub(super) place: Place,
    /// Whether nothing evicts it.
    locked: bool,
    /// References that the program holds.
    references: u32,
    /// Calls under way that need it.
    users: u32,
}

/// Where a run stands, as heuristics see it.
pub(super) struct World<'a> {
    pub(super) program: &'a Program,
    pub(super) clock_ns: u64,
    /// The call that the program made last.
    pub(super) call: CallId,
    pub(super) seats: Vec<Seat>,
}

impl World<'_> {
    pub(super) fn seat(&self, storage: SeatId) -> &Seat {
        &self.seats[storage.index()]
    }

    /// The evicted storages that `storage` was made from, or that were made from it.
    pub(super) fn evicted_neighbours(&self, storage: SeatId) -> impl Iterator<Item = SeatId> + '_ {
        let (parents, children) = (self.program.parents(storage), self.program.children(storage));
        parents
            .iter()
            .chain(children)
            .filter(|neighbour| neighbour.since <= self.call && self.seat(neighbour.storage).place == Place::Evicted)
            .map(|neighbour| neighbour.storage)
    }

    /// What evicting `storage` gains: bytes · time since it was last asked for.
    pub(super) fn bytes_and_staleness(&self, storage: SeatId) -> f64 {
        let seat = self.seat(storage);
        seat.bytes as f64 * (self.clock_ns - seat.accessed_ns) as f64
    }
}

/// A call that is being run, and which of its arguments are still to be seen to.
struct Frame {
    call: CallId,
    /// What it is run for: none where it returns nothing.
    wanted: Option<TensorId>,
    /// Arguments that were missing when it began, from here on in [`Simulator::missing`].
    missing_from: u32,
    next: u32,
    missing_to: u32,
}

/// One run.
pub(super) struct Simulator<'a, H> {
    world: World<'a>,
    heuristic: H,
    pool: Pool,
    /// Per tensor: whether it is there. A view is lost with its storage and does not come back with it.
    defined: Vec<bool>,
    /// Per storage: the tensors that stand in it.
    tensors: Vec<Vec<TensorId>>,
    budget_bytes: u64,
    recompute_ns_max: u64,
    device_bytes: u64,
    run: OnlineRun,
    missing: Vec<TensorId>,
    frames: Vec<Frame>,
    walk: Walk,
}

impl<'a, H: Heuristic> Simulator<'a, H> {
    pub(super) fn new(program: &'a Program, heuristic: H, budget_bytes: u64, recompute_ns_max: u64) -> Self {
        let nothing = |&bytes: &u64| Seat {
            cost_ns: 0,
            bytes,
            accessed_ns: 0,
            place: Place::Evicted,
            locked: false,
            references: 0,
            users: 0,
        };
        Simulator {
            world: World {
                program,
                // The authors' clock starts at 1.
                clock_ns: 1,
                call: CallId(0),
                seats: program.bytes.iter().map(nothing).collect(),
            },
            heuristic,
            pool: Pool::new(program.bytes.len()),
            defined: vec![false; program.tensors.len()],
            tensors: vec![Vec::new(); program.bytes.len()],
            budget_bytes,
            recompute_ns_max,
            device_bytes: program.unseen_bytes,
            run: OnlineRun { peak_bytes: program.unseen_bytes, ..OnlineRun::default() },
            missing: Vec::new(),
            frames: Vec::new(),
            walk: Walk::new(program.bytes.len()),
        }
    }

    /// Runs the program to its end, or to where it fails.
    pub(super) fn run(mut self) -> OnlineRun {
        let program = self.world.program;
        let ended = program.steps.iter().try_for_each(|&step| self.step(step));
        self.run.makespan_ns = self.world.clock_ns - 1;
        match ended {
            Ok(()) => self.run.makespan_ns += program.tail_ns,
            Err(outcome) => self.run.outcome = outcome,
        }
        self.run
    }

    fn step(&mut self, step: Step) -> Result<(), Outcome> {
        match step {
            Step::Call(call) => self.call(call),
            Step::Lock(tensor) => self.lock(tensor),
            Step::Retain(tensor) => {
                self.seat_of(tensor).references += 1;
                Ok(())
            }
            Step::Release(tensor) => {
                self.release(tensor);
                Ok(())
            }
        }
    }

    fn storage(&self, tensor: TensorId) -> SeatId {
        self.world.program.tensor(tensor).storage
    }

    fn seat_of(&mut self, tensor: TensorId) -> &mut Seat {
        let storage = self.storage(tensor);
        &mut self.world.seats[storage.index()]
    }

    /// The program makes a call for the first time.
    fn call(&mut self, id: CallId) -> Result<(), Outcome> {
        let program = self.world.program;
        let call = program.call(id);
        self.world.call = id;
        self.world.clock_ns += call.gap_ns;
        for tensor in program.outputs(id) {
            let storage = self.storage(tensor);
            // Two views that one call makes of one storage cost it once.
            let counted = self.tensors[storage.index()].last().is_some_and(|&last| program.tensor(last).call == id);
            let seat = &mut self.world.seats[storage.index()];
            seat.cost_ns += if counted { 0 } else { call.cost_ns };
            seat.references += 1;
            let is_new = self.tensors[storage.index()].is_empty();
            self.tensors[storage.index()].push(tensor);
            if is_new {
                self.heuristic.created(&self.world, storage);
            }
        }
        self.perform(id, program.outputs(id).next(), 0)?;
        let clock_ns = self.world.clock_ns;
        for tensor in program.outputs(id) {
            self.seat_of(tensor).accessed_ns = clock_ns;
        }
        Ok(())
    }

    /// Makes sure of `tensor`, for good.
    fn lock(&mut self, tensor: TensorId) -> Result<(), Outcome> {
        if !self.defined[tensor.index()] {
            self.rebuild(tensor)?;
        }
        self.lock_storage(self.storage(tensor));
        Ok(())
    }

    fn lock_storage(&mut self, storage: SeatId) {
        if !std::mem::replace(&mut self.world.seats[storage.index()].locked, true) {
            self.use_storage(storage);
        }
    }

    /// The program lets go of a tensor. A storage without references is evicted at once.
    fn release(&mut self, tensor: TensorId) {
        let storage = self.storage(tensor);
        let seat = &mut self.world.seats[storage.index()];
        seat.references -= 1;
        if seat.references == 0 && seat.place == Place::Present {
            if !seat.locked {
                self.evict(storage);
            } else if self.world.program.roots_are_freed {
                self.free_root(storage);
            }
        }
    }

    /// Frees a root, unless something evicted that the program still refers to would be rebuilt from it; then the root
    /// stays to the end. What could only be rebuilt from it is a root from now on (banishing: DTR, deallocation).
    fn free_root(&mut self, root: SeatId) {
        let (mut needed, mut heirs) = (false, Vec::new());
        self.walk.from(&self.world, root, Direction::Descendants, |storage, seat| match seat.place {
            Place::Evicted => needed |= seat.references > 0,
            Place::Present => heirs.push(storage),
            Place::Gone => {}
        });
        if needed {
            return;
        }
        heirs.into_iter().for_each(|heir| self.lock_storage(heir));
        let seat = &mut self.world.seats[root.index()];
        seat.place = Place::Gone;
        self.device_bytes -= seat.bytes;
    }

    /// Keeps `storage` from being evicted until [`Self::leave_storage`].
    fn use_storage(&mut self, storage: SeatId) {
        let seat = &mut self.world.seats[storage.index()];
        debug_assert_eq!(seat.place, Place::Present);
        seat.users += 1;
        if seat.users == 1 {
            self.pool.remove(storage);
        }
    }

    fn leave_storage(&mut self, storage: SeatId) {
        let seat = &mut self.world.seats[storage.index()];
        seat.users -= 1;
        if seat.users == 0 {
            self.pool.push(storage);
        }
    }

    fn evict(&mut self, storage: SeatId) {
        let seat = &mut self.world.seats[storage.index()];
        debug_assert!(seat.place == Place::Present && seat.users == 0);
        seat.place = Place::Evicted;
        self.device_bytes -= seat.bytes;
        self.pool.remove(storage);
        for tensor in &self.tensors[storage.index()] {
            self.defined[tensor.index()] = false;
        }
        self.heuristic.evicted(&self.world, storage);
    }

    /// Evicts until `bytes` more fit.
    fn free(&mut self, bytes: u64) -> Result<(), Outcome> {
        while self.device_bytes + bytes > self.budget_bytes {
            let needed_bytes = self.device_bytes + bytes;
            let victim = lowest(&mut self.heuristic, &self.world, &self.pool);
            let victim = victim.ok_or(Outcome::OutOfMemory { needed_bytes })?;
            self.run.evictions += 1;
            self.evict(victim);
        }
        Ok(())
    }

    /// Makes `tensor` again, although no call asks for it.
    fn rebuild(&mut self, tensor: TensorId) -> Result<(), Outcome> {
        let call = self.world.program.tensor(tensor).call;
        self.perform(call, Some(tensor), self.world.program.call(call).cost_ns)
    }

    /// Runs `call` for `wanted`, which counts as `recompute_ns` of recompute, and before it whatever makes its arguments.
    /// Recursion is by frames: chains are as long as programs.
    fn perform(&mut self, call: CallId, wanted: Option<TensorId>, recompute_ns: u64) -> Result<(), Outcome> {
        debug_assert!(self.frames.is_empty());
        self.begin(call, wanted);
        while let Some(frame) = self.frames.last_mut() {
            if frame.next < frame.missing_to {
                let argument = self.missing[frame.next as usize];
                if self.defined[argument.index()] {
                    frame.next += 1;
                    self.use_storage(self.storage(argument));
                } else {
                    self.begin(self.world.program.tensor(argument).call, Some(argument));
                }
            } else {
                let frame = self.frames.pop().expect("it was looked at");
                self.missing.truncate(frame.missing_from as usize);
                let rerun_ns = self.world.program.call(frame.call).cost_ns;
                self.finish(&frame, if self.frames.is_empty() { recompute_ns } else { rerun_ns })?;
            }
        }
        Ok(())
    }

    /// Locks the arguments of `call` that are there, and notes those that are not.
    fn begin(&mut self, call: CallId, wanted: Option<TensorId>) {
        let (missing_from, clock_ns) = (self.missing.len() as u32, self.world.clock_ns);
        for &argument in self.world.program.arguments(call) {
            self.seat_of(argument).accessed_ns = clock_ns;
            if self.defined[argument.index()] {
                self.use_storage(self.storage(argument));
            } else {
                self.missing.push(argument);
            }
        }
        let missing_to = self.missing.len() as u32;
        self.frames.push(Frame { call, wanted, missing_from, next: missing_from, missing_to });
    }

    /// Runs a call whose arguments are all there, and lets go of them.
    fn finish(&mut self, frame: &Frame, recompute_ns: u64) -> Result<(), Outcome> {
        let program = self.world.program;
        let call = program.call(frame.call);
        self.free(call.output_bytes + call.workspace_bytes)?;
        self.compute(frame.call, frame.wanted);
        for &argument in program.arguments(frame.call) {
            self.leave_storage(self.storage(argument));
        }
        self.run.recompute_ns += recompute_ns;
        if self.run.recompute_ns > self.recompute_ns_max { Err(Outcome::Thrashed) } else { Ok(()) }
    }

    /// The call itself: its time, its bytes, and what is there after it.
    fn compute(&mut self, id: CallId, wanted: Option<TensorId>) {
        let program = self.world.program;
        let call = program.call(id);
        self.world.clock_ns += call.cost_ns;
        self.device_bytes += call.output_bytes;
        self.run.peak_bytes = self.run.peak_bytes.max(self.device_bytes + call.workspace_bytes);
        // The wanted tensor comes last, as in the authors' simulator: it is the order of the pool.
        for output in program.outputs(id).filter(|&output| Some(output) != wanted).chain(wanted) {
            if std::mem::replace(&mut self.defined[output.index()], true) {
                // It was there already: the second copy goes.
                self.device_bytes -= program.tensor(output).bytes;
                continue;
            }
            let storage = self.storage(output);
            let place = &mut self.world.seats[storage.index()].place;
            if std::mem::replace(place, Place::Present) == Place::Evicted {
                self.heuristic.materialised(&self.world, storage);
                self.pool.push(storage);
            }
        }
    }
}
