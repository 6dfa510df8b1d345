//! Programs: lists of instructions over registers. An operand is a number taken modulo the registers there are, so every list of
//! instructions is a program.

use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

const OPERATIONS: &[Operation] = &[
    Operation::Add,
    Operation::Multiply,
    Operation::MultiplyNumber,
    Operation::MatMul,
    Operation::Linear,
    Operation::Transpose,
    Operation::Slice,
    Operation::Reshape,
    Operation::Expand,
    Operation::Concatenate,
    Operation::Chunk,
    Operation::Clone,
    Operation::AddInPlace,
    Operation::ScaleInPlace,
    Operation::ReluInPlace,
    Operation::WriteSlice,
    Operation::FillInPlace,
    Operation::ZeroInPlace,
    Operation::CopyInto,
    Operation::Relu,
    Operation::Gelu,
    Operation::Tanh,
    Operation::Softmax,
    Operation::LogSumExp,
    Operation::LayerNorm,
    Operation::BatchNorm,
    Operation::Dropout,
    Operation::Bernoulli,
    Operation::NoiseLike,
    Operation::NormalInPlace,
    Operation::Randomized,
    Operation::CumulativeSum,
    Operation::Sort,
    Operation::TopK,
    Operation::Where,
    Operation::MaskedFill,
    Operation::IndexSelect,
    Operation::ScatterAdd,
    Operation::IndexPut,
    Operation::MaxPool,
    Operation::Convolution,
    Operation::Attention,
    Operation::HalfPrecision,
    Operation::Complex,
    Operation::Lists,
    Operation::FromNothing,
    Operation::FilledIn,
    Operation::Detach,
    Operation::Free,
    Operation::Read,
    Operation::Backward,
    Operation::Slope,
    Operation::Update,
    Operation::Rarely,
];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Operation {
    Add,
    Multiply,
    MultiplyNumber,
    MatMul,
    Linear,
    Transpose,
    Slice,
    Reshape,
    Expand,
    Concatenate,
    Chunk,
    Clone,
    AddInPlace,
    ScaleInPlace,
    ReluInPlace,
    WriteSlice,
    FillInPlace,
    ZeroInPlace,
    CopyInto,
    Relu,
    Gelu,
    Tanh,
    Softmax,
    LogSumExp,
    LayerNorm,
    BatchNorm,
    Dropout,
    Bernoulli,
    NoiseLike,
    NormalInPlace,
    Randomized,
    CumulativeSum,
    Sort,
    TopK,
    Where,
    MaskedFill,
    IndexSelect,
    ScatterAdd,
    IndexPut,
    MaxPool,
    Convolution,
    Attention,
    HalfPrecision,
    Complex,
    /// Operators on lists of registers.
    Lists,
    FromNothing,
    FilledIn,
    Detach,
    Free,
    Read,
    /// Adds the gradients of a register to the parameters.
    Backward,
    /// A gradient that has a gradient.
    Slope,
    /// Moves a parameter against its gradient.
    Update,
    /// In some iterations after the recorded ones, one more operator.
    Rarely,
}

impl Operation {
    /// Whether it writes nothing that was there before.
    pub(super) fn only_reads(self) -> bool {
        matches!(
            self,
            Operation::Add
                | Operation::Multiply
                | Operation::MultiplyNumber
                | Operation::MatMul
                | Operation::Linear
                | Operation::Slice
                | Operation::Concatenate
                | Operation::Clone
                | Operation::ZeroInPlace
                | Operation::Relu
                | Operation::Gelu
                | Operation::Tanh
                | Operation::Softmax
                | Operation::LogSumExp
                | Operation::LayerNorm
                | Operation::Dropout
                | Operation::CumulativeSum
                | Operation::Where
                | Operation::Attention
        )
    }
}

/// One step of a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Instruction {
    pub(super) operation: Operation,
    pub(super) a: u32,
    pub(super) b: u32,
    pub(super) c: u32,
}

/// A program, and the seed of its values.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Program {
    pub(super) seed: u64,
    pub(super) instructions: Vec<Instruction>,
}

impl Program {
    /// The program of a seed.
    pub fn random(seed: u64) -> Self {
        let mut random = ChaCha8Rng::seed_from_u64(seed);
        let length = random.random_range(5..40);
        let mut instructions: Vec<Instruction> = (0..length)
            .map(|_| Instruction {
                operation: OPERATIONS[random.random_range(0..OPERATIONS.len())],
                a: random.random(),
                b: random.random(),
                c: random.random(),
            })
            .collect();
        // A program without these trains nothing.
        let (a, b, c) = (u32::MAX, 0, 0);
        instructions.push(Instruction { operation: Operation::Backward, a, b, c });
        instructions.push(Instruction { operation: Operation::Update, a, b, c });
        Program { seed, instructions }
    }
}

impl std::fmt::Display for Program {
    fn fmt(&self, to: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        writeln!(to, "seed {}", self.seed)?;
        self.instructions
            .iter()
            .try_for_each(|step| writeln!(to, "    {:?}({}, {}, {})", step.operation, step.a, step.b, step.c))
    }
}
