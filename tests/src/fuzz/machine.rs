//! A program with its values, which runs.

use std::panic::resume_unwind;
use std::thread;

use plimsoll_runtime::torch::stand_by;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use tch::{Device, Kind, TchError, Tensor};

use super::elsewhere::Elsewhere;
use super::program::{Instruction, Operation, Program};
use super::{Mode, PLANNED, RECORDED, WARM_UP};
use crate::beyond_tch::blend;

/// Registers are cut down to this many elements.
pub(super) const ELEMENTS_MAX: i64 = 1 << 14;
const WIDTH: i64 = 64;
const HEIGHT: i64 = 32;

/// A program with its values.
pub(super) struct Machine<'a> {
    program: &'a Program,
    mode: Mode,
    parameters: Vec<Tensor>,
    /// What the optimizer keeps.
    states: Vec<Tensor>,
    running: [Tensor; 2],
    iteration: usize,
    pub(super) elsewhere: Option<Elsewhere>,
}

impl<'a> Machine<'a> {
    pub(super) fn new(program: &'a Program, mode: Mode) -> Self {
        tch::manual_seed(program.seed as i64);
        let on_cpu = (Kind::Float, Device::Cpu);
        let parameters =
            (0..3).map(|_| (Tensor::randn([WIDTH, WIDTH], on_cpu) * 0.1).set_requires_grad(true)).collect();
        let states = if mode.has_states() { 3 } else { 0 };
        let states = (0..states).map(|_| Tensor::ones([WIDTH, WIDTH], on_cpu)).collect();
        Machine {
            program,
            mode,
            parameters,
            states,
            running: [Tensor::zeros([WIDTH], on_cpu), Tensor::ones([WIDTH], on_cpu)],
            iteration: 0,
            elsewhere: mode.has_others().then(|| Elsewhere::start(program.seed)),
        }
    }

    /// The program as it is after so many untouched iterations.
    pub(super) fn after(program: &'a Program, mode: Mode, iterations: usize) -> Result<Self, TchError> {
        let mut machine = Machine::new(program, mode);
        (0..iterations).try_for_each(|_| machine.iteration().map(drop))?;
        machine.elsewhere.iter().for_each(Elsewhere::catch_up);
        Ok(machine)
    }

    /// What outlives an iteration.
    pub(super) fn kept(&self) -> Vec<Tensor> {
        let mut kept: Vec<Tensor> = self.parameters.iter().map(Tensor::shallow_clone).collect();
        kept.extend(self.parameters.iter().map(Tensor::grad).filter(Tensor::defined));
        kept.extend(self.states.iter().chain(&self.running).map(Tensor::shallow_clone));
        kept
    }

    /// Runs the program once. Returns everything that is alive after it.
    pub(super) fn iteration(&mut self) -> Result<Vec<Tensor>, TchError> {
        tch::manual_seed((self.program.seed ^ (self.iteration as u64) << 40) as i64);
        for mut gradient in self.parameters.iter().map(Tensor::grad).filter(Tensor::defined) {
            let _ = gradient.f_detach_()?.f_zero_()?;
        }
        let on_cpu = (Kind::Float, Device::Cpu);
        let mut registers = Vec::new();
        for pass in 0..self.mode.passes() {
            registers.clear();
            for height in self.heights(pass) {
                registers.push(Tensor::f_randn([height, WIDTH], on_cpu)?);
            }
            for (step, is_left_out) in self.program.instructions.iter().zip(self.left_out()) {
                match is_left_out {
                    true => registers.push(registers[step.a as usize % registers.len()].shallow_clone()),
                    false if self.mode == Mode::Beside => self.step_beside(*step, &mut registers)?,
                    false => self.step(*step, &mut registers)?,
                }
            }
        }
        // Also where an operator is refused and `tch` panics, gradients are recorded again.
        let without_gradients = tch::no_grad_guard();
        for (state, parameter) in self.states.iter_mut().zip(&mut self.parameters) {
            let _ = state.f_mul_scalar_(0.9)?.f_add_(&parameter.f_abs()?)?;
            let _ = parameter.f_sub_(&state.f_mul_scalar(0.01)?)?;
        }
        drop(without_gradients);
        self.iteration += 1;
        if let Some(elsewhere) = &self.elsewhere {
            registers.extend(elsewhere.has_seen()?);
        }
        registers.extend(self.kept());
        Ok(registers)
    }

    /// Rows of the batches of a pass of this iteration: of every other program both have the same.
    fn heights(&self, pass: u64) -> [i64; 2] {
        if !self.mode.is_resized() {
            return [HEIGHT; 2];
        }
        let mut random = ChaCha8Rng::seed_from_u64(self.program.seed ^ (self.iteration as u64) << 32 ^ pass << 48);
        let mut height = || HEIGHT / 8 * random.random_range(2..=24);
        let first = height();
        [first, if self.program.seed.is_multiple_of(2) { first } else { height() }]
    }

    /// Whether each instruction is left out of this iteration: what it would make is what it would make it of.
    fn left_out(&self) -> Vec<bool> {
        let instructions = self.program.instructions.len();
        if self.mode != Mode::LeftOut || self.iteration < WARM_UP + RECORDED {
            return vec![false; instructions];
        }
        let mut random = ChaCha8Rng::seed_from_u64(self.program.seed ^ (self.iteration as u64) << 32);
        (0..instructions).map(|_| random.random_bool(0.1)).collect()
    }

    /// A step while another thread looks at what those before it have made, which it may wait for; some are other threads' own.
    fn step_beside(&mut self, step: Instruction, registers: &mut Vec<Tensor>) -> Result<(), TchError> {
        if !step.operation.only_reads() {
            self.elsewhere.iter().for_each(Elsewhere::catch_up);
        }
        let known = registers.len();
        if step.c.is_multiple_of(5) {
            let ran = thread::scope(|scope| {
                let thread = scope.spawn(|| {
                    stand_by();
                    self.step(step, registers)
                });
                thread.join()
            });
            ran.unwrap_or_else(|panic| resume_unwind(panic))?;
        } else {
            self.step(step, registers)?;
        }
        for (elsewhere, made) in self.elsewhere.iter().zip(registers.get(known)) {
            elsewhere.look_at(made.shallow_clone());
        }
        Ok(())
    }

    fn step(&mut self, step: Instruction, registers: &mut Vec<Tensor>) -> Result<(), TchError> {
        let a = registers[step.a as usize % registers.len()].shallow_clone();
        let b = registers[step.b as usize % registers.len()].shallow_clone();
        if let Some(elsewhere) = self.elsewhere.as_ref().filter(|_| self.mode == Mode::LetGo) {
            elsewhere.let_go(a.shallow_clone());
        }
        let number = f64::from(step.c % 7) * 0.3 - 0.9;
        let parameter = &self.parameters[step.c as usize % self.parameters.len()];
        let (rows, columns) = (a.size()[0], a.size()[1]);
        let alike = |b: Tensor| if b.size() == a.size() { Ok(b) } else { b.f_mean(Kind::Float) };
        let made = match step.operation {
            Operation::Add => a.f_add(&alike(b)?)?,
            Operation::Multiply => a.f_mul(&alike(b)?)?,
            Operation::MultiplyNumber => a.f_mul_scalar(number)?,
            Operation::MatMul => a.f_matmul(&a.f_transpose(0, 1)?)?.f_mul_scalar(0.05)?,
            Operation::Linear if columns == WIDTH => a.f_matmul(parameter)?,
            Operation::Linear => a.f_mul(&parameter.f_mean(Kind::Float)?)?,
            Operation::Transpose => a.f_transpose(0, 1)?,
            Operation::Slice => {
                let rows_kept = (rows / 2).max(1);
                a.f_slice(0, rows - rows_kept, rows, 1)?
            }
            Operation::Reshape if rows % 2 == 0 => a.f_reshape([rows / 2, columns * 2])?,
            Operation::Reshape => a.f_reshape([columns, rows])?,
            Operation::Expand => a.f_slice(0, 0, 1, 1)?.f_expand([rows, columns], false)?,
            Operation::Concatenate if step.c.is_multiple_of(2) => Tensor::f_cat(&[&a, &a.f_add(&alike(b)?)?], 0)?,
            // As caches of keys and values begin.
            Operation::Concatenate => Tensor::f_cat(&[&Tensor::f_empty([0], (Kind::Float, Device::Cpu))?, &a], 0)?,
            Operation::Chunk => {
                let mut parts = a.f_chunk(2, 1)?;
                parts.swap_remove(0)
            }
            Operation::Clone => a.f_add_scalar(0.0)?,
            Operation::AddInPlace => a.shallow_clone().f_add_(&alike(b)?)?,
            Operation::ScaleInPlace => a.shallow_clone().f_mul_scalar_(0.9)?,
            Operation::ReluInPlace => a.shallow_clone().f_relu_()?,
            Operation::WriteSlice => {
                let _ = a.f_slice(0, 0, (rows / 2).max(1), 1)?.f_mul_scalar_(number)?;
                return Ok(());
            }
            Operation::FillInPlace => a.shallow_clone().f_fill_(number)?,
            Operation::ZeroInPlace => {
                let mut fresh = a.f_detach()?.f_add_scalar(1.0)?;
                fresh.f_zero_()?.f_add(&a)?
            }
            Operation::CopyInto => {
                let mut fresh = Tensor::f_empty(a.size(), (Kind::Float, Device::Cpu))?;
                fresh.f_copy_(&a)?;
                fresh
            }
            Operation::Relu => a.f_relu()?,
            Operation::Gelu => a.f_gelu("none")?,
            Operation::Tanh => a.f_tanh()?,
            Operation::Softmax => a.f_softmax(1, Kind::Float)?,
            Operation::LogSumExp => a.f_logsumexp([1i64].as_slice(), true)?.f_add(&a)?,
            Operation::LayerNorm => a.f_layer_norm([columns], None::<&Tensor>, None::<&Tensor>, 1e-5, false)?,
            Operation::BatchNorm if columns == WIDTH && rows > 1 => {
                let [mean, variance] = &self.running;
                let (none, momentum) = (None::<&Tensor>, 0.1);
                a.f_batch_norm(none, none, Some(mean), Some(variance), true, momentum, 1e-5, false)?
            }
            Operation::BatchNorm => a.f_sub(&a.f_mean_dim([0i64].as_slice(), true, Kind::Float)?)?,
            Operation::Dropout => a.f_dropout(0.3, true)?,
            Operation::Bernoulli => a.f_sigmoid()?.f_bernoulli()?.f_mul(&a)?,
            Operation::NoiseLike => a.f_add(&a.f_randn_like()?.f_mul_scalar(0.1)?)?,
            Operation::NormalInPlace => {
                let mut fresh = a.f_detach()?.f_mul_scalar(1.0)?;
                fresh.f_normal_(0.0, 1.0)?.f_mul(&a)?
            }
            Operation::Randomized => a.f_alpha_dropout(0.2, true)?,
            Operation::CumulativeSum => a.f_cumsum(1, Kind::Float)?.f_mul_scalar(0.1)?,
            Operation::Sort => a.f_sort(1, step.c.is_multiple_of(2))?.0,
            Operation::TopK => a.f_topk((columns / 2).max(1), 1, true, true)?.0,
            Operation::Where => a.f_where_self(&a.f_gt(0.0)?, &a.f_neg()?)?,
            Operation::MaskedFill => a.f_masked_fill(&a.f_lt(number)?, 0.5)?,
            Operation::IndexSelect => {
                let index = Tensor::f_randint(rows, [rows], (Kind::Int64, Device::Cpu))?;
                a.f_index_select(0, &index)?
            }
            Operation::ScatterAdd => {
                let index = Tensor::f_randint(rows, [rows, columns], (Kind::Int64, Device::Cpu))?;
                a.f_mul_scalar(0.5)?.f_scatter_add(0, &index, &a)?
            }
            // What it writes is written before it asks for memory.
            Operation::IndexPut if step.c % 4 == 3 => {
                let index = Tensor::f_randint(rows, [(rows / 2).max(1)], (Kind::Int64, Device::Cpu))?;
                let source = a.f_slice(0, 0, (rows / 2).max(1), 1)?;
                a.f_mul_scalar(0.5)?.f_index_reduce_(0, &index, &source, "mean", true)?
            }
            Operation::IndexPut => {
                let index = Tensor::f_randint(rows, [(rows / 2).max(1)], (Kind::Int64, Device::Cpu))?;
                let values = a.f_slice(0, 0, (rows / 2).max(1), 1)?.f_mul_scalar(2.0)?;
                a.f_mul_scalar(1.0)?.f_index_put_(&[Some(&index)], &values, true)?
            }
            Operation::MaxPool if columns % 2 == 0 => {
                a.f_unsqueeze(0)?.f_max_pool1d([2], [2], [0], [1], false)?.f_squeeze_dim(0)?
            }
            Operation::MaxPool => a.f_max_dim(1, true)?.0.f_add(&a)?,
            Operation::Convolution => {
                let kernel = parameter.f_slice(0, 0, 3, 1)?.f_slice(1, 0, 3, 1)?.f_reshape([1, 1, 3, 3])?;
                let image = a.f_reshape([1, 1, rows, columns])?;
                let none = None::<&Tensor>;
                image.f_conv2d(&kernel, none, [1, 1], [1, 1], [1, 1], 1)?.f_reshape([rows, columns])?
            }
            Operation::Attention if columns % 4 == 0 => {
                let heads = a.f_reshape([1, rows, 4, columns / 4])?.f_transpose(1, 2)?;
                let (none, dropout) = (None::<&Tensor>, if step.c.is_multiple_of(2) { 0.0 } else { 0.2 });
                let mixed =
                    Tensor::f_scaled_dot_product_attention(&heads, &heads, &heads, none, dropout, true, None, false)?;
                mixed.f_transpose(1, 2)?.f_reshape([rows, columns])?
            }
            Operation::Attention => a.f_softmax(0, Kind::Float)?,
            Operation::HalfPrecision => {
                let half = a.f_to_kind(Kind::BFloat16)?;
                half.f_mul(&half)?.f_to_kind(Kind::Float)?
            }
            Operation::Complex if columns % 2 == 0 => {
                let complex = a.f_reshape([rows, columns / 2, 2])?.f_contiguous()?.f_view_as_complex()?;
                complex.f_mul(&complex.f_conj()?)?.f_view_as_real()?.f_reshape([rows, columns])?
            }
            Operation::Complex => a.f_abs()?,
            Operation::Lists => {
                let others = registers.iter().filter(|other| other.kind() == Kind::Float).take(1 + step.c as usize % 6);
                let lists: Vec<Tensor> = [&a, &b].into_iter().chain(others).map(Tensor::shallow_clone).collect();
                blend(&lists, number)?
            }
            Operation::FromNothing => {
                let made = [Tensor::f_zeros, Tensor::f_ones, Tensor::f_rand][step.c as usize % 3];
                a.f_add(&made(&a.size(), (Kind::Float, Device::Cpu))?)?
            }
            Operation::FilledIn => {
                let values = vec![number as f32; a.numel()];
                a.f_mul(&Tensor::f_from_slice(&values)?.f_reshape(a.size())?)?
            }
            Operation::Detach => a.f_detach()?,
            Operation::Free => {
                if registers.len() > 1 {
                    let _ = registers.swap_remove(step.a as usize % registers.len());
                }
                return Ok(());
            }
            Operation::Read => a.f_mul_scalar(a.f_mean(Kind::Float)?.f_double_value(&[])?.clamp(-2.0, 2.0))?,
            Operation::Backward => return backward(&a),
            Operation::Slope => self.slope(&a)?,
            Operation::Update => return self.update(step.c as usize),
            // After the recorded iterations, one of each plan.
            Operation::Rarely
                if self.iteration > WARM_UP + RECORDED && self.iteration % PLANNED == step.c as usize % 5 =>
            {
                a.f_exp()?.f_clamp(-2.0, 2.0)?
            }
            Operation::Rarely => return Ok(()),
        };
        registers.push(cut_down(made)?);
        Ok(())
    }

    /// The gradient of a register by a parameter, as a value that has a gradient itself.
    fn slope(&self, a: &Tensor) -> Result<Tensor, TchError> {
        let parameter = &self.parameters[0];
        let loss = a.f_mul(&parameter.f_mean(Kind::Float)?)?.f_square()?.f_mean(Kind::Float)?;
        let slope = Tensor::f_run_backward(&[&loss], &[parameter], true, true)?.remove(0);
        a.f_mul(&slope.f_mean(Kind::Float)?)
    }

    fn update(&mut self, which: usize) -> Result<(), TchError> {
        let count = self.parameters.len();
        let parameter = &mut self.parameters[which % count];
        let gradient = parameter.grad();
        if !gradient.defined() {
            return Ok(());
        }
        let _without_gradients = tch::no_grad_guard();
        let gradient = gradient.f_clamp(-1.0, 1.0)?;
        parameter.f_sub_(&gradient.f_mul_scalar(0.01)?).map(drop)
    }
}

fn backward(a: &Tensor) -> Result<(), TchError> {
    if !a.requires_grad() {
        return Ok(());
    }
    let loss = a.f_square()?.f_mean(Kind::Float)?;
    Tensor::f_run_backward(&[&loss], &[] as &[&Tensor], true, false).map(drop)
}

/// At most so many elements, and never none.
fn cut_down(made: Tensor) -> Result<Tensor, TchError> {
    let [rows, columns] = made.size()[..] else {
        return made.f_reshape([1, -1]);
    };
    if rows * columns <= ELEMENTS_MAX { Ok(made) } else { made.f_slice(0, 0, (ELEMENTS_MAX / columns).max(1), 1) }
}

/// What [`digests`] says where tensors may be away: of copies, which operators make.
pub(super) fn digests_within(alive: &[Tensor]) -> Result<Vec<u64>, TchError> {
    let next = Tensor::f_rand([4], (Kind::Double, Device::Cpu))?;
    let copied = |tensor: &Tensor| tch::no_grad(|| tensor.f_detach_copy());
    alive.iter().chain([&next]).map(|tensor| Ok(digest(&copied(tensor)?))).collect()
}

/// What every tensor holds, and what the generator would draw next.
pub(super) fn digests(alive: &[Tensor]) -> Vec<u64> {
    let next = Tensor::rand([4], (Kind::Double, Device::Cpu));
    alive.iter().chain([&next]).map(digest).collect()
}

fn digest(tensor: &Tensor) -> u64 {
    let tensor = tensor.detach().resolve_conj().contiguous();
    let mut bytes = vec![0u8; tensor.numel() * tensor.kind().elt_size_in_bytes()];
    tensor.copy_data_u8(&mut bytes, tensor.numel());
    let start = tensor.size().iter().fold(0xcbf2_9ce4_8422_2325u64, |hash, &size| hash.rotate_left(7) ^ size as u64);
    let (words, rest) = bytes.as_chunks();
    let words = words.iter().map(|&word| u64::from_le_bytes(word)).chain(rest.iter().map(|&byte| u64::from(byte)));
    words.fold(start, |hash, word| (hash ^ word).wrapping_mul(0x0100_0000_01b3).rotate_left(23))
}
