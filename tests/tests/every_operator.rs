//! Every operator that real programs use either works under any lawful plan, bit for bit, or is kept out of it by the
//! mask; and no operator does what its schema does not say.

use plimsoll_env::recording::record;
use plimsoll_env::workload::{Workload, named_variables};
use plimsoll_runtime::torch::Audit;
use plimsoll_runtime::{Action, Lineage};
use plimsoll_tests::beyond_tch::{Autocast, Update};
use plimsoll_tests::{Recorded, Stage, one_at_a_time, plan_by, random_plan, session};
use tch::nn::{self, Module, ModuleT, OptimizerConfig, RNN};
use tch::{Device, Kind, Reduction, TchError, Tensor};

const ON_CPU: (Kind, Device) = (Kind::Float, Device::Cpu);
const NONE: Option<&Tensor> = None;
/// Iterations under a plan, after one that only matches the loop to its trace.
const PLANNED: usize = 3;
const SEEDS: u64 = 3;
const RECORDED: usize = 3;
const WARM_UP: usize = 2;

type Losses = Box<dyn Fn() -> Result<Tensor, TchError>>;

/// A training loop around one forward pass.
struct Loop {
    name: &'static str,
    variables: nn::VarStore,
    optimizer: nn::Optimizer,
    update: Update,
    loss: Losses,
    /// Backward passes before the optimizer's step.
    micro_batches: usize,
    iterations: i64,
}

impl Loop {
    /// A loop whose model `make` builds.
    fn new(name: &'static str, make: &dyn Fn(&nn::Path) -> Losses) -> Self {
        tch::manual_seed(3);
        let variables = nn::VarStore::new(Device::Cpu);
        let loss = make(&variables.root());
        // Sparse gradients are taken by plain descent alone.
        let optimizer = match name.contains("sparse") {
            true => nn::Sgd::default().build(&variables, 1e-2),
            false => nn::AdamW::default().build(&variables, 1e-3),
        };
        let update = match name {
            "foreach" => Update::Foreach(Vec::new()),
            "fused" => Update::Fused(None),
            _ => Update::Tch,
        };
        Loop { name, variables, optimizer: optimizer.unwrap(), update, loss, micro_batches: 1, iterations: 0 }
    }
}

impl Workload for Loop {
    fn name(&self) -> &str {
        self.name
    }

    fn family(&self) -> &str {
        "operators"
    }

    fn iteration(&mut self) -> Result<f64, TchError> {
        tch::manual_seed(self.iterations);
        self.iterations += 1;
        self.optimizer.zero_grad();
        let mut total = Tensor::f_zeros([1], ON_CPU)?;
        for _ in 0..self.micro_batches {
            let loss = (self.loss)()?;
            loss.f_backward()?;
            total = total.f_add(&loss.f_detach()?)?;
        }
        self.update.step(&mut self.optimizer, &self.variables.trainable_variables(), 1e-3)?;
        total.f_double_value(&[0])
    }

    fn variables(&self) -> Vec<(String, Tensor)> {
        named_variables(&self.variables)
    }
}

/// Runs one loop untouched and under several plans, and says what became of it.
fn survives(make: &dyn Fn() -> Loop) {
    session().audit(None);
    let mut untouched = make();
    let mut stage = |iterations: usize| {
        let losses: Vec<f64> = (0..iterations).map(|_| untouched.iteration().unwrap()).collect();
        Stage::of(&losses, &untouched)
    };
    let mut expected = vec![stage(WARM_UP + RECORDED)];
    expected.extend((0..SEEDS + 2).map(|_| stage(1 + PLANNED)));
    drop(untouched);

    session().audit(Some(Audit::Effects));
    let mut workload = make();
    let name = workload.name;
    let (trace, losses) = record(session(), &mut workload, RECORDED, "cpu").unwrap_or_else(|e| panic!("{name}: {e}"));
    let mut recorded = Recorded { workload, lineage: Lineage::of(&trace), trace, losses };
    Stage::of(&recorded.losses, &recorded.workload).assert_same(&expected[0], name);
    assert_eq!(session().audit_findings(), Vec::<String>::new(), "{name}");
    session().audit(None);

    let greedy = |recomputable: bool| if recomputable { Action::Recompute } else { Action::Swap };
    let mut plans: Vec<_> = vec![plan_by(&recorded.lineage, |_| Action::Swap), plan_by(&recorded.lineage, greedy)];
    plans.extend((0..SEEDS).map(|seed| random_plan(&recorded.lineage, seed)));
    let half = recorded.trace.peak_bytes / 2;
    let (mut reruns, mut swapped_bytes) = (0, 0);
    for (index, plan) in plans.iter().enumerate() {
        let what = format!("{name}, plan {index}");
        let budget_bytes = if index % 2 == 0 { u64::MAX } else { half };
        let (_, reports) =
            recorded.follow(plan, budget_bytes, 1 + PLANNED, |workload, _| workload.iteration().unwrap());
        for (iteration, report) in reports.iter().enumerate() {
            assert_eq!(report.deviation, None, "{what}");
            assert_eq!(report.followed, iteration > 0, "{what}");
            reruns += report.reruns;
            swapped_bytes += report.prefetched_bytes;
        }
        let losses = &recorded.losses[recorded.losses.len() - reports.len()..];
        Stage::of(losses, &recorded.workload).assert_same(&expected[1 + index], &what);
    }
    let windows = recorded.lineage.windows();
    let recomputable = windows.iter().filter(|window| window.recomputable).count();
    println!(
        "{name}: {} windows, {recomputable} recomputable, {reruns} reruns, {swapped_bytes} bytes swapped",
        windows.len()
    );
    assert!(reruns > 0 && swapped_bytes > 0, "{name}: nothing was tested");
}

fn of(name: &'static str, make: impl Fn(&nn::Path) -> Losses) {
    of_micro_batches(name, 1, make);
}

fn of_micro_batches(name: &'static str, micro_batches: usize, make: impl Fn(&nn::Path) -> Losses) {
    let _running = one_at_a_time();
    survives(&|| Loop { micro_batches, ..Loop::new(name, &make) });
}

fn noise(sizes: &[i64]) -> Result<Tensor, TchError> {
    Tensor::f_randn(sizes, ON_CPU)
}

fn mean_square(tensor: &Tensor) -> Result<Tensor, TchError> {
    tensor.f_square()?.f_mean(Kind::Float)
}

fn linear(at: &nn::Path, name: &str, from: i64, to: i64) -> nn::Linear {
    nn::linear(at / name, from, to, Default::default())
}

#[test]
fn perceptron() {
    of("mlp", |at| {
        let (first, second) = (linear(at, "first", 64, 128), linear(at, "second", 128, 64));
        Box::new(move || {
            let hidden = first.forward(&noise(&[32, 64])?).f_gelu("tanh")?;
            second.forward(&hidden).f_mse_loss(&noise(&[32, 64])?, Reduction::Mean)
        })
    });
}

#[test]
fn convolution_batch_norm_dropout() {
    of("convolution", |at| {
        let convolution = nn::conv2d(at / "c", 3, 8, 3, nn::ConvConfig { padding: 1, ..Default::default() });
        let transposed =
            nn::conv_transpose2d(at / "t", 8, 4, 2, nn::ConvTransposeConfig { stride: 2, ..Default::default() });
        let normalise = nn::batch_norm2d(at / "n", 8, Default::default());
        Box::new(move || {
            let hidden = convolution.forward(&noise(&[8, 3, 16, 16])?);
            let hidden = normalise.forward_t(&hidden, true).f_relu()?.f_dropout(0.3, true)?;
            mean_square(&transposed.forward(&hidden).f_feature_dropout(0.2, true)?)
        })
    });
}

#[test]
fn in_place_residual_blocks() {
    of("residual", |at| {
        let padded = nn::ConvConfig { padding: 1, bias: false, ..Default::default() };
        let layers: Vec<_> = (0..3)
            .map(|layer| {
                let at = at / layer;
                (nn::conv2d(&at / "c", 8, 8, 3, padded), nn::batch_norm2d(&at / "n", 8, Default::default()))
            })
            .collect();
        Box::new(move || {
            let mut hidden = noise(&[4, 8, 12, 12])?;
            for (convolution, normalise) in &layers {
                let mut inner = normalise.forward_t(&convolution.forward(&hidden), true);
                hidden = inner.f_add_(&hidden)?.f_relu_()?;
                hidden = hidden.f_mul_scalar(1.5)?.f_hardtanh_()?;
            }
            mean_square(&hidden.f_adaptive_avg_pool2d([2, 2])?)
        })
    });
}

#[test]
fn long_short_term_memory() {
    of("lstm", |at| {
        let config = nn::RNNConfig { num_layers: 2, dropout: 0.2, bidirectional: true, ..Default::default() };
        let lstm = nn::lstm(at / "lstm", 32, 32, config);
        Box::new(move || mean_square(&lstm.seq(&noise(&[8, 12, 32])?).0))
    });
}

#[test]
fn gated_recurrent_unit() {
    of("gru", |at| {
        let gru = nn::gru(at / "gru", 32, 48, nn::RNNConfig { num_layers: 2, dropout: 0.2, ..Default::default() });
        // Two steps: what recomputing everything reruns grows with every further one until such a plan is given up.
        Box::new(move || mean_square(&gru.seq(&noise(&[8, 2, 32])?).0))
    });
}

#[test]
fn attention_causal_and_with_dropout() {
    of("attention", |at| {
        let (into, out) = (linear(at, "into", 64, 192), linear(at, "out", 64, 64));
        Box::new(move || {
            let mut hidden = noise(&[2, 24, 64])?;
            for dropout in [0.0, 0.2] {
                let heads = into.forward(&hidden).f_reshape([2, 24, 3, 4, 16])?.f_permute([2, 0, 3, 1, 4])?;
                let parts = heads.f_unbind(0)?;
                let (q, k, v) = (&parts[0], &parts[1], &parts[2]);
                let mixed = Tensor::f_scaled_dot_product_attention(q, k, v, NONE, dropout, true, None, false)?;
                let mixed = mixed.f_transpose(1, 2)?.f_reshape([2, 24, 64])?;
                hidden = hidden.f_add(&out.forward(&mixed))?;
                hidden = hidden.f_layer_norm([64], NONE, NONE, 1e-5, false)?;
            }
            mean_square(&hidden)
        })
    });
}

#[test]
fn attention_with_a_mask() {
    of("masked attention", |at| {
        let into = linear(at, "into", 32, 96);
        Box::new(move || {
            let heads = into.forward(&noise(&[4, 32, 32])?).f_reshape([4, 32, 3, 2, 16])?.f_permute([2, 0, 3, 1, 4])?;
            let parts = heads.f_unbind(0)?;
            let mask = Tensor::f_ones([32, 32], (Kind::Bool, Device::Cpu))?.f_tril(0)?;
            let scores = parts[0].f_matmul(&parts[1].f_transpose(-2, -1)?)?;
            let scores = scores.f_masked_fill(&mask.f_logical_not()?, f64::NEG_INFINITY)?;
            let weights = scores.f_softmax(-1, Kind::Float)?.f_dropout(0.1, true)?;
            let plain = weights.f_matmul(&parts[2])?;
            let (q, k, v) = (&parts[0], &parts[1], &parts[2]);
            let fused = Tensor::f_scaled_dot_product_attention(q, k, v, Some(&mask), 0.0, false, None, false)?;
            mean_square(&plain.f_add(&fused)?)
        })
    });
}

#[test]
fn embeddings_and_cross_entropy() {
    of("embedding", |at| {
        let embedding = nn::embedding(at / "e", 100, 64, Default::default());
        let bags = nn::embedding(at / "b", 100, 64, Default::default());
        let out = linear(at, "out", 64, 100);
        Box::new(move || {
            let tokens = Tensor::f_randint(100, [4, 16], (Kind::Int64, Device::Cpu))?;
            let offsets = Tensor::f_arange_start_step(0, 64, 16, (Kind::Int64, Device::Cpu))?;
            let bag =
                Tensor::f_embedding_bag(&bags.ws, &tokens.f_flatten(0, 1)?, &offsets, false, 1, false, NONE, false)?;
            let hidden = embedding.forward(&tokens).f_add(&bag.0.f_unsqueeze(1)?)?;
            let logits = out.forward(&hidden).f_reshape([64, 100])?;
            logits.f_cross_entropy_loss(&tokens.f_flatten(0, 1)?, NONE, Reduction::Mean, -100, 0.1)
        })
    });
}

#[test]
fn sparse_embedding_gradients() {
    of("sparse embedding", |at| {
        let weights = at.var("w", &[200, 64], nn::Init::Randn { mean: 0.0, stdev: 0.1 });
        let hidden = linear(at, "hidden", 64, 64);
        Box::new(move || {
            let tokens = Tensor::f_randint(200, [64], (Kind::Int64, Device::Cpu))?;
            mean_square(&hidden.forward(&Tensor::f_embedding(&weights, &tokens, -1, false, true)?).f_tanh()?)
        })
    });
}

#[test]
fn products_with_sparse_matrices() {
    of("sparse matrices", |at| {
        let (first, second) = (linear(at, "first", 64, 64), linear(at, "second", 64, 64));
        let links = Tensor::eye(32, ON_CPU) + Tensor::eye(32, ON_CPU).roll([3], [0]) * 0.5;
        let (by_places, by_rows) = (links.to_sparse_sparse_dim(2), links.to_sparse_csr(None));
        Box::new(move || {
            // What is inside of it is used by itself, too, and is idle then.
            let scale = by_places.f_values()?.f_mean(Kind::Float)?.f_add(&by_rows.f_values()?.f_mean(Kind::Float)?)?;
            let hidden = by_places.f_mm(&first.forward(&noise(&[32, 64])?).f_tanh()?)?.f_tanh()?;
            mean_square(&by_rows.f_mm(&second.forward(&hidden).f_tanh()?)?.f_mul(&scale)?)
        })
    });
}

#[test]
fn pooling_with_indices() {
    of("pooling", |at| {
        let convolution = nn::conv2d(at / "c", 3, 8, 3, nn::ConvConfig { padding: 1, ..Default::default() });
        Box::new(move || {
            let hidden = convolution.forward(&noise(&[4, 3, 16, 16])?);
            let (pooled, indices) = hidden.f_max_pool2d_with_indices([2, 2], [2, 2], [0, 0], [1, 1], false)?;
            let back = pooled.f_max_unpool2d(&indices, [16, 16])?;
            let average = hidden.f_avg_pool2d([3, 3], [1, 1], [1, 1], false, true, None)?;
            let (most, _) = hidden.f_max_dim(1, true)?;
            let (adaptive, _) = hidden.f_adaptive_max_pool2d([4, 4])?;
            let resized = adaptive.f_upsample_nearest2d([16, 16], None, None)?;
            let smooth = adaptive.f_upsample_bilinear2d([16, 16], false, None, None)?;
            let line = hidden
                .f_detach()?
                .f_reshape([32, 16, 16])?
                .f_max_pool1d([2], [2], [0], [1], false)?
                .f_mean(Kind::Float)?;
            let back = back.f_mul(&line)?;
            mean_square(&back.f_add(&average)?.f_mul(&most)?.f_add(&resized)?.f_add(&smooth)?)
        })
    });
}

#[test]
fn normalisations() {
    of("normalisations", |at| {
        let group = nn::group_norm(at / "g", 4, 16, Default::default());
        let layer = nn::layer_norm(at / "l", vec![12, 12], Default::default());
        let scale = at.ones("scale", &[16]);
        Box::new(move || {
            let hidden = layer.forward(&group.forward(&noise(&[4, 16, 12, 12])?));
            let instance = hidden.f_instance_norm(Some(&scale), NONE, NONE, NONE, true, 0.1, 1e-5, false)?;
            let batch = instance.f_batch_norm(NONE, NONE, NONE, NONE, true, 0.1, 1e-5, false)?;
            mean_square(&batch.f_mul(&hidden.f_sigmoid()?)?.f_log_softmax(1, Kind::Float)?)
        })
    });
}

#[test]
fn sixteen_bit_activations() {
    of("bf16", |at| {
        let (first, second) = (linear(at, "first", 64, 128), linear(at, "second", 128, 64));
        let half = |layer: &nn::Linear, input: &Tensor| -> Result<Tensor, TchError> {
            let bias = layer.bs.as_ref().unwrap().f_to_kind(Kind::BFloat16)?;
            input.f_to_kind(Kind::BFloat16)?.f_linear(&layer.ws.f_to_kind(Kind::BFloat16)?, Some(&bias))
        };
        Box::new(move || {
            let hidden = half(&first, &noise(&[32, 64])?)?.f_relu()?.f_dropout(0.1, true)?;
            mean_square(&half(&second, &hidden)?.f_to_kind(Kind::Float)?.f_layer_norm([64], NONE, NONE, 1e-5, false)?)
        })
    });
}

#[test]
fn autocast_to_sixteen_bits() {
    of("autocast", |at| {
        let (first, second) = (linear(at, "first", 64, 128), linear(at, "second", 128, 64));
        let convolution = nn::conv1d(at / "c", 1, 4, 3, nn::ConvConfig { padding: 1, ..Default::default() });
        Box::new(move || {
            let autocast = Autocast::enter()?;
            let hidden = first.forward(&noise(&[32, 64])?);
            assert_eq!(hidden.kind(), Kind::BFloat16, "autocast is on");
            let hidden = hidden.f_gelu("none")?.f_dropout(0.1, true)?;
            // The weights' cast is kept from their first use to the second.
            let hidden = second.forward(&hidden).f_add(&second.forward(&hidden.f_neg()?))?;
            let wide = convolution.forward(&hidden.f_unsqueeze(1)?).f_softmax(1, Kind::Float)?;
            drop(autocast);
            mean_square(&wide.f_to_kind(Kind::Float)?.f_add(&hidden.f_to_kind(Kind::Float)?.f_unsqueeze(1)?)?)
        })
    });
}

/// A model with parameters of several shapes.
fn of_several_layers(name: &'static str) {
    of(name, |at| {
        let (first, second) = (linear(at, "first", 64, 128), linear(at, "second", 128, 64));
        let normalise = nn::layer_norm(at / "n", vec![128], Default::default());
        Box::new(move || {
            let hidden = normalise.forward(&first.forward(&noise(&[32, 64])?)).f_relu()?.f_dropout(0.1, true)?;
            second.forward(&hidden).f_mse_loss(&noise(&[32, 64])?, Reduction::Mean)
        })
    });
}

#[test]
fn an_optimizer_of_foreach_operators() {
    of_several_layers("foreach");
}

#[test]
fn a_fused_optimizer() {
    of_several_layers("fused");
}

#[test]
fn gradients_accumulated() {
    of_micro_batches("accumulation", 3, |at| {
        let (first, second) = (linear(at, "first", 64, 128), linear(at, "second", 128, 64));
        Box::new(move || {
            mean_square(&second.forward(&first.forward(&noise(&[32, 64])?).f_silu()?.f_dropout(0.1, true)?))
        })
    });
}

#[test]
fn a_graph_walked_twice_and_a_gradient_of_a_gradient() {
    of("double backward", |at| {
        let (first, second) = (linear(at, "first", 64, 64), linear(at, "second", 64, 64));
        Box::new(move || {
            let input = noise(&[32, 64])?.f_set_requires_grad(true)?;
            let output = second.forward(&first.forward(&input).f_tanh()?).f_softplus()?;
            let score = output.f_mean(Kind::Float)?;
            let retained = Tensor::f_run_backward(&[&score], &[&first.ws], true, false)?.remove(0);
            let slope = Tensor::f_run_backward(&[&score], &[&input], true, true)?.remove(0);
            let penalty = slope.f_norm()?.f_sub_scalar(1.0)?.f_square()?;
            score.f_add(&penalty)?.f_add(&mean_square(&retained)?.f_mul_scalar(0.1)?)
        })
    });
}

#[test]
fn two_models_that_play_against_each_other() {
    of("two models", |at| {
        let generator = linear(at, "generator", 64, 64);
        let judge = nn::seq().add(linear(at, "j1", 64, 64)).add_fn(|x| x.leaky_relu()).add(linear(at, "j2", 64, 1));
        Box::new(move || {
            let made = generator.forward(&noise(&[32, 64])?).f_tanh()?;
            let (real, fake) = (judge.forward(&noise(&[32, 64])?), judge.forward(&made.f_detach()?));
            let (ones, zeros) = (real.f_ones_like()?, fake.f_zeros_like()?);
            let first = real.f_binary_cross_entropy_with_logits(&ones, NONE, NONE, Reduction::Mean)?;
            let second = fake.f_binary_cross_entropy_with_logits(&zeros, NONE, NONE, Reduction::Mean)?;
            first.f_add(&second)?.f_backward()?;
            judge.forward(&made).f_binary_cross_entropy_with_logits(&ones, NONE, NONE, Reduction::Mean)
        })
    });
}

#[test]
fn scattering_and_gathering() {
    of("scatter", |at| {
        let layer = linear(at, "layer", 64, 64);
        Box::new(move || {
            let hidden = layer.forward(&noise(&[32, 64])?);
            let rows = Tensor::f_randint(32, [16], (Kind::Int64, Device::Cpu))?;
            let places = Tensor::f_randint(32, [32, 64], (Kind::Int64, Device::Cpu))?;
            let put = hidden.f_mul_scalar(2.0)?.f_index_put_(&[Some(&rows)], &hidden.f_slice(0, 0, 16, 1)?, true)?;
            let scattered = put.f_scatter_add(0, &places, &hidden)?.f_gather(0, &places, false)?;
            let selected = scattered.f_index_select(0, &rows)?.f_index(&[Some(&rows.f_remainder(16)?)])?;
            let added = hidden.f_index_add(0, &rows, &selected)?.f_index_fill(0, &rows.f_slice(0, 0, 2, 1)?, 0.5)?;
            let taken = added.f_take(&places.f_slice(0, 0, 8, 1)?)?;
            mean_square(&added)?.f_add(&mean_square(&taken)?)
        })
    });
}

#[test]
fn joining_and_parting() {
    of("cat", |at| {
        let layer = linear(at, "layer", 64, 64);
        Box::new(move || {
            let hidden = layer.forward(&noise(&[32, 64])?);
            let halves = hidden.f_chunk(2, 1)?;
            let joined = Tensor::f_cat(&[&halves[1], &hidden, &halves[0].f_exp()?], 1)?;
            let parts = joined.f_split(32, 1)?;
            let stacked = Tensor::f_stack(&parts, 0)?;
            let single = stacked.f_unbind(1)?;
            let sized = joined.f_split_with_sizes([16, 112], 1)?;
            let repeated = single[0].f_repeat([2, 2])?.f_roll([3], [0])?.f_flip([1])?;
            let padded = sized[1].f_constant_pad_nd([1, 1])?.f_unfold(1, 4, 2)?;
            mean_square(&repeated)?.f_add(&mean_square(&padded)?)?.f_add(&mean_square(&stacked)?)
        })
    });
}

#[test]
fn sorting_and_summing() {
    of("sort", |at| {
        let layer = linear(at, "layer", 64, 64);
        Box::new(move || {
            let hidden = layer.forward(&noise(&[32, 64])?);
            let (sorted, _) = hidden.f_sort(1, true)?;
            let (most, places) = hidden.f_topk(32, 1, true, true)?;
            let sums = sorted.f_cumsum(1, Kind::Float)?.f_add(&hidden.f_sigmoid()?.f_cumprod(1, Kind::Float)?)?;
            let (median, _) = hidden.f_median_dim(1, true)?;
            let picked = sums.f_gather(1, &places, false)?.f_mul(&most)?;
            let spread = hidden.f_std_dim([1i64].as_slice(), true, true)?.f_add(&hidden.f_amax([1i64], true)?)?;
            mean_square(&picked.f_sub(&median)?.f_mul(&spread)?)
        })
    });
}

#[test]
fn masks_and_einsum() {
    of("masks", |at| {
        let layer = linear(at, "layer", 64, 64);
        Box::new(move || {
            let hidden = layer.forward(&noise(&[32, 64])?);
            let positive = hidden.f_gt(0.0)?;
            let chosen = hidden.f_where_self(&positive, &hidden.f_mul_scalar(0.1)?)?;
            let filled = chosen.f_masked_fill(&hidden.f_lt(-1.0)?, -1.0)?.f_clamp(-2.0, 2.0)?;
            let pairs = Tensor::f_einsum("ij,kj->ik", &[&filled, &hidden], None::<&[i64]>)?;
            let picked = pairs.f_masked_select(&pairs.f_gt(-1e9)?)?;
            let batch = hidden.f_reshape([4, 8, 64])?;
            let product = batch.f_bmm(&batch.f_transpose(1, 2)?)?.f_tril(0)?.f_add(&Tensor::f_eye(8, ON_CPU)?)?;
            mean_square(&pairs)?.f_add(&mean_square(&picked)?)?.f_add(&mean_square(&product)?)
        })
    });
}

#[test]
fn fourier_transforms_and_complex_views() {
    of("fft", |at| {
        let layer = linear(at, "layer", 64, 64);
        Box::new(move || {
            let hidden = layer.forward(&noise(&[32, 64])?);
            let spectrum = hidden.f_fft_rfft(None, 1, "ortho")?;
            let power = spectrum.f_mul(&spectrum.f_conj()?)?.f_real()?;
            let complex = hidden.f_reshape([32, 32, 2])?.f_view_as_complex()?;
            let turned = complex.f_mul(&complex.f_conj()?)?.f_add(&complex.f_fft_fft(None, 1, "ortho")?)?;
            let back = turned.f_view_as_real()?.f_add(&turned.f_imag()?.f_unsqueeze(-1)?)?;
            mean_square(&power)?.f_add(&mean_square(&back)?)
        })
    });
}

#[test]
fn random_operators() {
    of("random", |at| {
        let layer = linear(at, "layer", 64, 64);
        Box::new(move || {
            let hidden = layer.forward(&noise(&[32, 64])?);
            let noisy = hidden.f_add(&hidden.f_randn_like()?.f_mul_scalar(0.1)?)?.f_alpha_dropout(0.2, true)?;
            let (dropped, _) = noisy.f_native_dropout(0.3, true)?;
            let kept = dropped.f_mul(&hidden.f_sigmoid()?.f_bernoulli()?)?;
            let drawn = hidden.f_softmax(1, Kind::Float)?.f_detach()?.f_multinomial(64, true)?;
            let order = Tensor::f_randperm(32, (Kind::Int64, Device::Cpu))?;
            let mut jitter = Tensor::f_empty([32, 64], ON_CPU)?;
            let jitter = jitter.f_uniform_(0.5, 1.5)?.f_mul(&hidden.f_rand_like()?.f_exponential_(1.0)?)?;
            mean_square(&kept.f_gather(1, &drawn, false)?.f_index_select(0, &order)?.f_mul(&jitter)?)
        })
    });
}

#[test]
fn weights_divided_by_their_norm() {
    of("spectral norm", |at| {
        let weights = at.var("w", &[64, 64], nn::Init::Randn { mean: 0.0, stdev: 0.1 });
        let vectors = ["u", "v"].map(|name| at.ones_no_train(name, &[64]));
        // The vectors of one pass are written over in the next, while what was made with them is away.
        let pass = move |hidden: Tensor| -> Result<Tensor, TchError> {
            let [mut u, mut v] = [&vectors[0], &vectors[1]].map(Tensor::shallow_clone);
            tch::no_grad(|| {
                let turned = weights.f_tr()?.f_mv(&u)?;
                v.f_copy_(&turned.f_div(&turned.f_norm()?)?)?;
                let turned = weights.f_mv(&v)?;
                u.f_copy_(&turned.f_div(&turned.f_norm()?)?)
            })?;
            let [u, v] = [u.copy(), v.copy()];
            let normal = weights.f_div(&u.f_dot(&weights.f_mv(&v)?)?)?;
            hidden.f_linear(&normal, NONE)?.f_tanh()?.f_sin()
        };
        Box::new(move || mean_square(&pass(pass(pass(noise(&[32, 64])?)?)?)?))
    });
}

#[test]
fn views_written_in_place() {
    of("views in place", |at| {
        let layer = linear(at, "layer", 64, 64);
        Box::new(move || {
            let hidden = layer.forward(&noise(&[32, 64])?);
            let buffer = Tensor::f_zeros([64, 64], ON_CPU)?;
            buffer.f_slice(0, 0, 32, 1)?.f_copy_(&hidden)?;
            let _ = buffer.f_slice(0, 32, 64, 1)?.f_add_(&hidden.f_tanh()?)?;
            let _ = buffer.f_transpose(0, 1)?.f_slice(0, 0, 8, 1)?.f_mul_scalar_(2.0)?;
            let mut strided = buffer.f_as_strided([32, 32], [64, 2], 1)?;
            let mut diagonal = buffer.f_diagonal(0, 0, 1)?;
            let _ = diagonal.f_fill_(0.25)?;
            mean_square(&buffer.f_exp()?.f_clamp_max(9.0)?)?.f_add(&mean_square(&strided.f_mul_scalar_(1.5)?.f_sin()?)?)
        })
    });
}

#[test]
fn values_read_past_the_dispatcher() {
    of("reads", |at| {
        let layer = linear(at, "layer", 64, 64);
        let constants: &'static [f32] = Vec::leak((0..32 * 64).map(|index| (index % 7) as f32 * 0.1).collect());
        // Memory that libtorch does not own.
        // SAFETY: the constants are never freed, and nothing writes to them.
        let foreign =
            unsafe { Tensor::from_blob(constants.as_ptr().cast(), &[32, 64], &[64, 1], Kind::Float, Device::Cpu) };
        Box::new(move || {
            let hidden = layer.forward(&noise(&[32, 64])?).f_tanh()?;
            // By address, before another operator runs: from then on the storage may be idle, and its address faults.
            let mut copy = vec![0f32; 32 * 64];
            hidden.f_copy_data(&mut copy, 32 * 64)?;
            let mean = hidden.f_mean(Kind::Float)?.f_double_value(&[])?;
            let first = f64::from(copy[0]) + hidden.f_double_value(&[3, 5])?;
            let constant = Tensor::f_from_slice(constants)?.f_reshape([32, 64])?;
            let scaled = hidden.f_mul(&constant)?.f_mul_scalar(1.0 + mean + 0.1 * first)?;
            mean_square(&scaled.f_add(&foreign.f_mul(&hidden)?)?)
        })
    });
}

#[test]
fn linear_algebra() {
    of("linear algebra", |at| {
        let layer = linear(at, "layer", 32, 32);
        Box::new(move || {
            let hidden = layer.forward(&noise(&[4, 32, 32])?);
            let definite = hidden.f_bmm(&hidden.f_transpose(1, 2)?)?.f_add(&Tensor::f_eye(32, ON_CPU)?)?;
            let factor = definite.f_linalg_cholesky(false)?;
            let (q, r) = Tensor::f_linalg_qr(&hidden, "reduced")?;
            let solved = Tensor::f_linalg_solve(&definite, &hidden, true)?;
            let inverse = Tensor::f_linalg_inv(&definite)?;
            let product = Tensor::f_baddbmm(&factor, &q, &solved, 1.0, 1.0)?;
            mean_square(&product)?.f_add(&mean_square(&r.f_mul(&inverse)?)?)
        })
    });
}

#[test]
fn losses() {
    of("losses", |at| {
        let layer = linear(at, "layer", 64, 64);
        Box::new(move || {
            let hidden = layer.forward(&noise(&[32, 64])?);
            let target = noise(&[32, 64])?;
            let labels = Tensor::f_randint(64, [32], (Kind::Int64, Device::Cpu))?;
            let huber = hidden.f_huber_loss(&target, Reduction::Mean, 1.0)?;
            let smooth = hidden.f_smooth_l1_loss(&target, Reduction::Mean, 0.5)?;
            let divergence = hidden.f_log_softmax(1, Kind::Float)?.f_kl_div(
                &target.f_softmax(1, Kind::Float)?,
                Reduction::Mean,
                false,
            )?;
            let likely = hidden.f_log_softmax(1, Kind::Float)?.f_nll_loss(&labels, NONE, Reduction::Mean, -100)?;
            let far = hidden.f_l1_loss(&target, Reduction::Mean)?;
            let close = Tensor::f_cosine_similarity(&hidden, &target, 1, 1e-8)?.f_mean(Kind::Float)?;
            huber.f_add(&smooth)?.f_add(&divergence)?.f_add(&likely)?.f_add(&far)?.f_sub(&close)
        })
    });
}

/// A loop that makes a tensor, does something else for long, and uses the tensor again.
struct Idle {
    variables: nn::VarStore,
    /// Whether the tensor is read by its address meanwhile.
    reads: bool,
}

impl Workload for Idle {
    fn name(&self) -> &str {
        "idle"
    }

    fn family(&self) -> &str {
        "operators"
    }

    fn iteration(&mut self) -> Result<f64, TchError> {
        let early = Tensor::f_ones([128, 128], ON_CPU)?.f_exp()?;
        let mut other = Tensor::f_ones([512, 512], ON_CPU)?;
        for step in 0..60 {
            other = other.f_sin()?;
            if self.reads && step == 30 {
                let mut bytes = vec![0f32; 128 * 128];
                early.f_copy_data(&mut bytes, 128 * 128)?;
            }
        }
        early.f_sum(Kind::Float)?.f_add(&other.f_sum(Kind::Float)?)?.f_double_value(&[])
    }

    fn variables(&self) -> Vec<(String, Tensor)> {
        self.variables.variables().into_iter().collect()
    }
}

/// What is read is evicted: this process does not survive it.
fn read_an_evicted_tensor_by_its_address() {
    let _running = one_at_a_time();
    session();
    let mut workload = Idle { variables: nn::VarStore::new(Device::Cpu), reads: false };
    let (trace, losses) = record(session(), &mut workload, RECORDED, "cpu").unwrap();
    let mut recorded = Recorded { workload, lineage: Lineage::of(&trace), trace, losses };
    let plan = plan_by(&recorded.lineage, |_| Action::Swap);
    recorded.follow(&plan, u64::MAX, 1 + PLANNED, |workload, iteration| {
        workload.reads = iteration == PLANNED;
        if workload.reads {
            let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
            println!("{}", maps.lines().find(|line| line.contains("plimsoll")).unwrap_or("no such place"));
        }
        workload.iteration().unwrap()
    });
    println!("it was read");
}

#[test]
fn a_read_of_an_evicted_tensor_by_its_address_faults_at_a_place_that_says_why() {
    use std::os::unix::process::ExitStatusExt;
    const CHILD: &str = "PLIMSOLL_TESTS_READ_EVICTED";
    if std::env::var_os(CHILD).is_some() {
        return read_an_evicted_tensor_by_its_address();
    }
    let name = "a_read_of_an_evicted_tensor_by_its_address_faults_at_a_place_that_says_why";
    let child = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", name, "--nocapture"])
        .env(CHILD, "1")
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&child.stdout);
    assert_eq!(child.status.signal(), Some(libc::SIGSEGV), "{said}");
    assert!(said.contains("plimsoll: evicted tensor, read it through an operator"), "{said}");
    assert!(!said.contains("it was read"), "{said}");
}
