//! A small GPT whose passages have a different length in every iteration, under a budget. What happened when is written
//! to the file named on the command line, for Perfetto:
//!
//!     cargo run -p plimsoll-runtime --features torch --example gpt [TRACE.json]

use plimsoll_runtime::torch::{Budget, Runtime};
use tch::nn::{self, Module, OptimizerConfig};
use tch::{Device, Kind, Tensor};

const WIDTH: i64 = 128;
const HEADS: i64 = 4;
const ALPHABET: i64 = 64;

/// Causal attention and a perceptron, each behind a norm and beside a shortcut.
fn block(at: nn::Path) -> impl Fn(&Tensor) -> Tensor {
    let norms = ["n1", "n2"].map(|name| nn::layer_norm(&at / name, vec![WIDTH], Default::default()));
    let project = nn::linear(&at / "qkv", WIDTH, 3 * WIDTH, Default::default());
    let out = nn::linear(&at / "out", WIDTH, WIDTH, Default::default());
    let up = nn::linear(&at / "up", WIDTH, 4 * WIDTH, Default::default());
    let down = nn::linear(&at / "down", 4 * WIDTH, WIDTH, Default::default());
    move |x| {
        let (batch, length, _) = x.size3().expect("[batch, length, width]");
        let heads = project.forward(&norms[0].forward(x)).view([batch, length, 3 * HEADS, WIDTH / HEADS]);
        let [q, k, v] = <[Tensor; 3]>::try_from(heads.transpose(1, 2).chunk(3, 1)).expect("three");
        let seen = Tensor::scaled_dot_product_attention(&q, &k, &v, None::<&Tensor>, 0.0, true, None, false);
        let x = x + out.forward(&seen.transpose(1, 2).reshape([batch, length, WIDTH]));
        &x + down.forward(&up.forward(&norms[1].forward(&x)).gelu("none"))
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut plimsoll = Runtime::builder().budget(Budget::mebibytes(32)).log_events().build()?; // before the model
    let variables = nn::VarStore::new(Device::Cpu);
    let at = variables.root();
    let tokens = nn::embedding(&at / "tokens", ALPHABET, WIDTH, Default::default());
    let blocks: Vec<_> = (0..4).map(|layer| block(&at / layer)).collect();
    let head = nn::linear(&at / "head", WIDTH, ALPHABET, Default::default());
    let mut optimizer = nn::AdamW::default().build(&variables, 1e-3)?;

    for iteration in 0..18 {
        let length = [64, 96, 128][iteration % 3];
        let _iteration = plimsoll.iteration();
        let passage = Tensor::randint(ALPHABET, [8, length + 1], (Kind::Int64, Device::Cpu));
        let hidden = blocks.iter().fold(tokens.forward(&passage.narrow(1, 0, length)), |x, block| block(&x));
        let logits = head.forward(&hidden).view([-1, ALPHABET]);
        let loss = logits.cross_entropy_for_logits(&passage.narrow(1, 1, length).reshape([-1]));
        optimizer.backward_step(&loss);
        println!("{iteration}: length {length}, loss {:.4}", loss.double_value(&[]));
    }
    println!("{}", plimsoll.report());
    if let Some(path) = std::env::args().nth(1) {
        plimsoll.write_chrome_trace(path)?;
    }
    Ok(())
}
