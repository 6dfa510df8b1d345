//! `tch::vision`'s ResNet-18 under a budget, planned by search, or by the policy file named on the command line:
//!
//!     cargo run -p plimsoll-runtime --features torch --example under_budget [POLICY]

use plimsoll_runtime::PolicyFile;
use plimsoll_runtime::torch::{Budget, Runtime};
use tch::nn::{self, ModuleT, OptimizerConfig};
use tch::{Device, Kind, Tensor};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    // Before the model: what is allocated earlier is not counted. It takes 211 MiB untouched, of which 171 stay between iterations.
    let mut builder = Runtime::builder().budget(Budget::mebibytes(200));
    if let Some(path) = std::env::args().nth(1) {
        builder = builder.policy(PolicyFile::load(path)?);
    }
    let mut plimsoll = builder.build()?;

    let variables = nn::VarStore::new(Device::Cpu);
    let model = tch::vision::resnet::resnet18(&variables.root(), 10);
    let mut optimizer = nn::Adam::default().build(&variables, 1e-3)?;
    for iteration in 0..8 {
        let _iteration = plimsoll.iteration();
        let images = Tensor::randn([16, 3, 64, 64], (Kind::Float, Device::Cpu));
        let labels = Tensor::randint(10, [16], (Kind::Int64, Device::Cpu));
        let loss = model.forward_t(&images, true).cross_entropy_for_logits(&labels);
        optimizer.backward_step(&loss);
        println!("{iteration}: loss {:.4}", loss.double_value(&[]));
    }
    println!("{}", plimsoll.report());
    Ok(())
}
