//! Synthetic traces in the shape of real training: a forward pass that leaves activations behind, a backward pass that
//! reads them in reverse order and frees them, an update of every parameter.

use plimsoll_runtime::Trace;
use plimsoll_runtime::trace::{Access, AccessMode, Class, Operator, Phase, Storage, StorageId};

use super::draw::Draw;

const KIB: u64 = 1 << 10;

struct Loop<'a> {
    draw: &'a mut Draw,
    storages: Vec<Storage>,
    operators: Vec<Operator>,
}

impl Loop<'_> {
    fn storage(&mut self, bytes: u64, class: Class) -> StorageId {
        self.storages.push(Storage { bytes, class, locked: None });
        StorageId(self.storages.len() as u32 - 1)
    }

    fn run(&mut self, phase: Phase, reads: &[StorageId], creates: &[StorageId]) -> &mut Operator {
        let access = |&storage: &StorageId| Access { storage, mode: AccessMode::Read };
        self.operators.push(Operator {
            name: 0,
            phase,
            cost_ns: 4_000 + self.draw.below(60_000),
            spread_ns: 0,
            gap_ns: 500 + self.draw.below(2_000),
            workspace_bytes: self.draw.pick(&[0, 0, 0, 256 * KIB]),
            accesses: reads.iter().map(access).collect(),
            creates: creates.to_vec(),
            frees: Vec::new(),
            not_replayable: None,
        });
        self.operators.last_mut().expect("just added")
    }
}

/// A trace of about `operators` operators: of every five, two run forward, two backward and one updates.
pub fn realistic_trace(seed: u64, operators: usize) -> Trace {
    let draw = &mut Draw::new(seed);
    let steps = operators / 5;
    let mut training = Loop { draw, storages: Vec::new(), operators: Vec::new() };
    let parameters: Vec<StorageId> = (0..steps)
        .map(|_| {
            let bytes = 16 * KIB * training.draw.within(1, 8);
            training.storage(bytes, Class::Parameter)
        })
        .collect();
    let input = training.storage(512 * KIB, Class::Input);
    let initial_storages = training.storages.len() as u32;

    // Forward: y = f(x, w), and a = g(y, a recent one); a normalisation's small statistics stay beside it.
    let mut left = vec![(input, input, input)];
    for (step, &parameter) in parameters.iter().enumerate() {
        // Resolution falls from stage to stage, as in a network of convolutions.
        let stage = 64 >> (6 * step / steps);
        let (_, _, x) = left[left.len() - 1];
        let (_, _, skipped) = left[left.len().saturating_sub(4)];
        let bytes = 32 * KIB * stage * training.draw.within(1, 8);
        let y = training.storage(bytes, Class::Activation);
        let statistics = training.storage(4 * KIB, Class::Activation);
        let a = training.storage(bytes, Class::Activation);
        training.run(Phase::Forward, &[x, parameter], &[y, statistics]);
        training.run(Phase::Forward, &[y, skipped], &[a]);
        left.push((y, statistics, a));
    }
    // Backward, last step first: the gradient flows back, what the forward pass left is read and let go of.
    let mut gradient = training.storage(64 * KIB, Class::Temporary);
    let loss = left[left.len() - 1].2;
    training.run(Phase::Backward, &[loss], &[gradient]);
    let mut gradients = Vec::new();
    for (step, &parameter) in parameters.iter().enumerate().rev() {
        let (y, statistics, a) = left[step + 1];
        let bytes = training.storages[y.index()].bytes;
        let inner = training.storage(bytes, Class::Temporary);
        training.run(Phase::Backward, &[gradient, y], &[inner]).frees.extend([gradient, a]);
        let x = left[step].2;
        gradient = training.storage(training.storages[x.index()].bytes, Class::Temporary);
        let of_parameter = training.storage(training.storages[parameter.index()].bytes, Class::Gradient);
        let reads = [inner, x, parameter, statistics];
        training.run(Phase::Backward, &reads, &[gradient, of_parameter]).frees.extend([inner, y, statistics]);
        gradients.push((parameter, of_parameter));
    }
    let mut last = Some(gradient);
    for (parameter, gradient) in gradients {
        let operator = training.run(Phase::Update, &[gradient], &[]);
        operator.accesses.push(Access { storage: parameter, mode: AccessMode::Write });
        operator.frees.push(gradient);
        operator.frees.extend(last.take());
    }
    let Loop { storages, operators, .. } = training;
    let trace = Trace {
        workload: "realistic".into(),
        family: "synthetic".into(),
        device: "none".into(),
        recorded_iterations: 1,
        unseen_bytes: 0,
        tail_ns: 1_000,
        makespan_ns: 0,
        peak_bytes: 0,
        names: vec!["operator".into()],
        storages,
        initial_storages,
        operators,
        carried: Vec::new(),
    };
    trace.check().expect("generated traces are lawful");
    trace
}
