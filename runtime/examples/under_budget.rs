//! A training loop of one's own under a budget of 90 % of what it takes untouched, planned by a baseline or by the policy
//! file named on the command line:
//!
//!     cargo run -p plimsoll-runtime --features torch --example under_budget [POLICY]

use plimsoll_runtime::baselines::Dtr;
use plimsoll_runtime::torch::{Executor, HostEngine, Recorder, Session};
use plimsoll_runtime::{ActionSet, Lineage, PolicyFile, Problem, Timeline, plan, plan_learned};
use tch::nn::{self, ModuleT, OptimizerConfig};
use tch::{Device, Kind, Tensor};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    // Before the model: what is allocated earlier is not counted.
    let session = Session::install()?;

    let variables = nn::VarStore::new(Device::Cpu);
    let model = tch::vision::resnet::resnet18(&variables.root(), 10);
    let mut optimizer = nn::Adam::default().build(&variables, 1e-3)?;
    let mut train_step = || {
        let images = Tensor::randn([16, 3, 64, 64], (Kind::Float, Device::Cpu));
        let labels = Tensor::randint(10, [16], (Kind::Int64, Device::Cpu));
        let loss = model.forward_t(&images, true).cross_entropy_for_logits(&labels);
        optimizer.backward_step(&loss);
        loss.double_value(&[])
    };

    let mut recorder = Recorder::new(session);
    for _ in 0..6 {
        recorder.iteration(&mut train_step)?;
    }
    let trace = recorder.finish(2, "resnet18", "resnet", "cpu")?;

    let lineage = Lineage::of(&trace);
    let link = HostEngine::probe();
    let budget_bytes = trace.peak_bytes * 9 / 10;
    let problem =
        Problem { trace: &trace, lineage: &lineage, tiers: link.into(), budget_bytes, actions: ActionSet::ALL };
    let planned = match std::env::args().nth(1) {
        Some(path) => plan_learned(problem, &PolicyFile::load(path)?.into_policy(), 8).planned,
        None => plan(problem, &mut Dtr),
    };
    println!("keep-all peak {} bytes, budget {budget_bytes} bytes", trace.peak_bytes);

    let (schedule, _) = Timeline::new(&trace, &lineage, link).schedule(&planned.plan, budget_bytes);
    let engine = Box::new(HostEngine::new(None));
    let mut executor = Executor::new(session, &trace, &lineage, &planned.plan, schedule, engine);
    for iteration in 0..5 {
        let (loss, report) = executor.iteration(&mut train_step)?;
        println!("{iteration}: loss {loss:.4}, peak {} bytes, followed {}", report.peak_bytes, report.followed);
    }
    Ok(())
}
