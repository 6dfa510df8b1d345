//! Programs whose shapes change from iteration to iteration end with a plan for each shape, taken from the cache; the
//! budget is held throughout, and so is every bit. Where the data stands does not matter.

use plimsoll_runtime::search::Limits;
use plimsoll_runtime::torch::report::Course as Driven;
use plimsoll_runtime::torch::{Budget, IterationReport, Report, Runtime, Session};
use plimsoll_runtime::{ActionSet, Link, Planner};
use plimsoll_tests::budget::{Untouched, assert_held, run_under, runtime};
use plimsoll_tests::perceptron::{Course, Perceptron};
use plimsoll_tests::stand_in::{before_late_device, open};
use plimsoll_tests::{Stage, fast_link, one_at_a_time, session};
use tch::{Device, Kind, Tensor};

fn run(courses: &[Course], share: f64) -> Vec<IterationReport> {
    let iterate = |workload: &mut Perceptron, iteration: usize| workload.iterate(courses[iteration]);
    let untouched = Untouched::run(|| Perceptron::new(2), iterate, courses.len());
    let budget_bytes = untouched.between(share);
    let (mut runtime, mut workload) = (runtime(budget_bytes), Perceptron::new(2));
    let (losses, reports) = run_under(&mut runtime, &mut workload, iterate, courses.len());
    println!("{}", runtime.report());
    assert_held(&reports, budget_bytes, "the loop");
    Stage::of(&losses, &workload).assert_same(&untouched.stage, "the loop");
    reports
}

/// Eight layers of `width` inputs and outputs, the same every time.
fn layers(width: i64) -> Tensor {
    layers_on(Device::Cpu, width)
}

/// The same on a device.
fn layers_on(device: Device, width: i64) -> Tensor {
    tch::manual_seed(3);
    (Tensor::randn([8, width, width], (Kind::Float, device)) * 0.1).set_requires_grad(true)
}

/// What all layers make of a batch, as a loss.
fn loss_of(weights: &Tensor, batch: Tensor) -> Tensor {
    let hidden = (0..8).fold(batch, |hidden, layer| hidden.matmul(&weights.get(layer)).tanh());
    hidden.square().mean(Kind::Float)
}

/// Takes one step down a loss, and returns it.
fn descend(weights: &Tensor, loss: &Tensor) -> f64 {
    loss.backward();
    update(weights);
    loss.double_value(&[])
}

/// Moves weights against their gradient, which is zero then.
fn update(weights: &Tensor) {
    tch::no_grad(|| {
        let mut gradient = weights.grad();
        let _ = weights.shallow_clone().f_sub_(&(&gradient * 0.1)).unwrap();
        let _ = gradient.zero_();
    });
}

/// How many plans were for what had none: the others are of loops that have drifted, as any may on a busy machine.
fn programs_planned(report: &Report) -> u64 {
    report.plans - report.replans
}

/// The width of eight layers, and bytes to train them in beyond what stays.
const NARROW: (i64, u64) = (128, 5 << 19);
const WIDE: (i64, u64) = (256, 9 << 19);

/// Iterations on such layers, marked or to be found, left alone and within a budget: the same losses, and the budget is held.
fn train(
    is_marked: bool,
    (width, room_bytes): (i64, u64),
    iterate: impl Fn(&Tensor, i64) -> f64,
    iterations: i64,
) -> Report {
    train_by(runtime, session(), is_marked, || layers(width), room_bytes, iterate, iterations)
}

/// The same of any model, by any runtime, on the device of that session.
fn train_by<M>(
    runtime: impl FnOnce(u64) -> Runtime,
    session: Session,
    is_marked: bool,
    make: impl Fn() -> M,
    room_bytes: u64,
    iterate: impl Fn(&M, i64) -> f64,
    iterations: i64,
) -> Report {
    let untouched = make();
    let expected: Vec<f64> = (0..iterations).map(|iteration| iterate(&untouched, iteration)).collect();
    let weights = make();
    let mut runtime = runtime(session.live_bytes() + room_bytes);
    let losses: Vec<f64> = if is_marked {
        let step = |iteration| {
            let _iteration = runtime.iteration();
            iterate(&weights, iteration)
        };
        (0..iterations).map(step).collect()
    } else {
        let _detection = runtime.detect().unwrap();
        (0..iterations).map(|iteration| iterate(&weights, iteration)).collect()
    };
    let report = runtime.report();
    println!("{report}");
    assert_eq!(losses, expected, "marked: {is_marked}");
    assert!(report.peak_bytes <= report.budget_bytes && report.over_budget_bytes == 0);
    report
}

#[test]
fn three_lengths_in_turn() {
    let _running = one_at_a_time();
    let lengths = [256, 384, 512];
    let courses: Vec<Course> = (0..24).map(|iteration| Course::Train(lengths[iteration % 3])).collect();
    let reports = run(&courses, 0.5);
    let settled = &reports[12..];
    for (report, course) in settled.iter().zip(&courses[12..]) {
        let known = matches!(report.course, Driven::Planned | Driven::Declined);
        assert!(known && report.followed, "{course:?}: {:?}", report.deviation);
        assert!(report.deviation.is_none(), "{course:?}: {:?}", report.deviation);
        assert_eq!(Some(report.peak_bytes), report.predicted.map(|predicted| predicted.peak_bytes), "{course:?}");
    }
    // What fits is left alone; the longest does not.
    assert!(settled.iter().any(|report| report.course == Driven::Planned));
}

/// What is let go of before the first operator, as gradients are that are not zeroed, is no part of what a length takes.
#[test]
fn lengths_of_a_loop_that_lets_go_of_something_first() {
    let _running = one_at_a_time();
    let kind = (Kind::Float, Device::Cpu);
    session();
    let weights = layers(128);
    let mut runtime = runtime(session().live_bytes() + (5 << 19));
    let mut kept = None;
    for iteration in 0..24 {
        let _iteration = runtime.iteration();
        drop(kept.take());
        let batch = Tensor::randn([[256, 384, 512][iteration % 3], 128], kind);
        descend(&weights, &loss_of(&weights, batch));
        kept = Some(Tensor::ones([512, 512], kind));
    }
    let report = runtime.report();
    for (at, iteration) in report.latest.iter().enumerate().skip(12) {
        assert!(iteration.followed && iteration.deviation.is_none(), "{at}: {:?}", iteration.deviation);
        assert_eq!(Some(iteration.peak_bytes), iteration.predicted.map(|predicted| predicted.peak_bytes), "{at}");
    }
    assert!(report.latest[12..].iter().any(|iteration| iteration.course == Driven::Planned));
    assert!(report.peak_bytes <= report.budget_bytes);
}

#[test]
fn lengths_at_random() {
    let _running = one_at_a_time();
    let order = [0, 2, 1, 1, 0, 2, 2, 0, 1, 2, 0, 0, 1, 2, 1, 0, 2, 0, 1, 1, 2, 0];
    let courses: Vec<Course> = order.iter().map(|&index| Course::Train([256, 384, 512][index])).collect();
    let reports = run(&courses, 0.5);
    assert!(reports[14..].iter().all(|report| report.course != Driven::Reactive), "unknown after 14 iterations");
    // Nothing is done by the plan for the length that came before.
    let other = reports[14..].iter().find(|report| !report.followed);
    assert!(other.is_none(), "another plan was begun: {other:?}");
}

#[test]
fn forty_lengths_each_of_which_comes_again_after_all_others() {
    let _running = one_at_a_time();
    let courses: Vec<Course> = (0..160).map(|iteration| Course::Train(256 + 4 * (iteration % 40))).collect();
    let reports = run(&courses, 0.5);
    for report in &reports[120..] {
        assert!(report.course != Driven::Reactive && report.deviation.is_none(), "{report:?}");
    }
}

/// A runtime that may not swap.
fn recomputing(budget_bytes: u64) -> Runtime {
    let builder = Runtime::builder().budget(Budget::bytes(budget_bytes)).link(fast_link());
    builder.actions(ActionSet::RECOMPUTE).build().unwrap()
}

/// What fits is left alone: the first longer batch finds nothing planned, and nothing to swap.
#[test]
fn a_longer_batch_where_nothing_may_be_swapped() {
    let _running = one_at_a_time();
    let iterate = |weights: &Tensor, iteration: i64| {
        let batch = Tensor::randn([if iteration < 5 { 64 } else { 512 }, 128], (Kind::Float, Device::Cpu));
        descend(weights, &loss_of(weights, batch))
    };
    let (width, room_bytes) = NARROW;
    let report = train_by(recomputing, session(), true, || layers(width), room_bytes, iterate, 8);
    assert!(report.reruns > 0 && report.offloaded_bytes == 0, "{report}");
    assert!(report.latest.iter().any(|iteration| iteration.course == Driven::Declined), "{report}");
}

/// The same of a loop that comes to have more, as an optimizer's state, beside which its iterations do not fit as they did.
#[test]
fn more_to_stay_where_nothing_may_be_swapped() {
    const KIND: (Kind, Device) = (Kind::Float, Device::Cpu);
    let _running = one_at_a_time();
    let step = |weights: &Tensor| descend(weights, &loss_of(weights, Tensor::randn([256, 128], KIND)));
    let untouched = layers(128);
    let expected: Vec<f64> = (0..10).map(|_| step(&untouched)).collect();
    let weights = layers(128);
    let mut runtime = recomputing(session().live_bytes() + NARROW.1);
    let (mut losses, mut kept) = (Vec::new(), None);
    for iteration in 0..10 {
        if iteration == 5 {
            kept = Some(Tensor::ones([3 << 16], KIND));
        }
        let _iteration = runtime.iteration();
        losses.push(step(&weights));
    }
    drop(kept);
    let report = runtime.report();
    assert_eq!(losses, expected, "{report}");
    assert!(report.peak_bytes <= report.budget_bytes && report.reruns > 0 && report.offloaded_bytes == 0, "{report}");
}

/// An iteration that departs from its plan when it has made much already: the plan needs no recipe of most of that.
#[test]
fn a_second_pass_before_the_backward_pass_where_nothing_may_be_swapped() {
    const KIND: (Kind, Device) = (Kind::Float, Device::Cpu);
    let _running = one_at_a_time();
    for is_evaluated in [true, false] {
        let iterate = |weights: &Tensor, iteration: i64| {
            let loss_of_some = |rows: i64| loss_of(weights, Tensor::randn([rows, 128], KIND));
            let loss = loss_of_some(256);
            let more = (iteration >= 5).then(|| match is_evaluated {
                true => tch::no_grad(|| loss_of_some(600)),
                false => loss_of_some(256),
            });
            descend(weights, &more.map_or(loss.shallow_clone(), |more| loss + more))
        };
        let (width, room_bytes) = NARROW;
        let report = train_by(recomputing, session(), true, || layers(width), room_bytes, iterate, 12);
        assert!(report.reruns > 0 && report.offloaded_bytes == 0, "evaluated: {is_evaluated}: {report}");
    }
}

/// Batches padded to the longest passage in each: a length is planned for by what iterations of others told.
#[test]
fn lengths_none_of_which_comes_again() {
    let _running = one_at_a_time();
    let lengths = |iteration: i64| 256 + iteration * 89 % 257;
    let courses: Vec<Course> = (0..80).map(|iteration| Course::Train(lengths(iteration))).collect();
    let reports = run(&courses, 0.5);
    let is_unknown = |report: &&IterationReport| report.course == Driven::Reactive;
    let largest = |at: usize| (0..at as i64).all(|before| lengths(before) < lengths(at as i64));
    for (at, report) in reports.iter().enumerate().skip(2).filter(|&(at, _)| !largest(at)) {
        assert!(report.course != Driven::Reactive && report.deviation.is_none(), "{at}: {report:?}");
    }
    println!("{} unknown", reports.iter().filter(is_unknown).count());
    assert!(reports.iter().filter(|report| report.course == Driven::Planned).count() > 40);
}

/// Graphs of any number of nodes and edges, of which a data-dependent share is left: sizes of several kinds, none of which is
/// larger whenever another is.
#[test]
fn sizes_of_several_kinds() {
    let _running = one_at_a_time();
    let kind = (Kind::Float, Device::Cpu);
    let iterate = |weights: &Tensor, iteration: i64| {
        tch::manual_seed(iteration);
        let (nodes, edges) = (96 + iteration * 37 % 61, 256 + iteration * 53 % 131);
        let mut hidden = Tensor::randn([nodes, 128], kind);
        let from = Tensor::randint(nodes, [edges], (Kind::Int64, Device::Cpu));
        let to = Tensor::randint(nodes, [edges], (Kind::Int64, Device::Cpu));
        for layer in 0..8 {
            let message = hidden.index_select(0, &from).matmul(&weights.get(layer)).tanh();
            hidden = Tensor::zeros([nodes, 128], kind).index_add(0, &to, &message).tanh();
        }
        let loss = hidden.masked_select(&hidden.gt(0.1)).square().mean(Kind::Float);
        descend(weights, &loss)
    };
    let report = train(true, NARROW, iterate, 60);
    let planned = report.latest[10..].iter().filter(|iteration| iteration.course == Driven::Planned).count();
    assert!(planned >= 45, "{planned}: {:?}", report.latest[50]);
}

/// Gradients of two batches add up, each of a length of its own: no plan for other pairs of them suits both, so that either is
/// planned for by itself, whether iterations are marked or found.
#[test]
fn two_lengths_in_every_iteration() {
    let _running = one_at_a_time();
    let lengths = |iteration: i64| [256 + iteration * 89 % 257, 256 + iteration * 53 % 257];
    let iterate = |weights: &Tensor, iteration: i64| descend_by_two(weights, iteration, lengths(iteration), |_| ());
    for is_marked in [true, false] {
        let report = train(is_marked, NARROW, iterate, 60);
        let of_course = |course| report.latest[10..].iter().filter(move |iteration| iteration.course == course).count();
        println!("{} were planned", of_course(Driven::Planned));
        assert!(of_course(Driven::Planned) >= 40, "marked: {is_marked}: {:?}", report.latest[39]);
        assert!(of_course(Driven::Reactive) <= 3, "marked: {is_marked}");
        let evictions = |iterations: &[IterationReport]| -> u64 {
            iterations.iter().map(|iteration| iteration.reactive_evictions).sum()
        };
        let [early, late] = [&report.latest[..10], &report.latest[30..]].map(evictions);
        assert!(late < early, "marked: {is_marked}: {late} evictions that nobody planned, of {early}");
    }
}

/// Where all that is there between two of them does not fit, they are not divided: bytes are made room for as they run out, and a
/// pair that comes again has its plan.
#[test]
fn two_lengths_that_cannot_be_divided() {
    let _running = one_at_a_time();
    let kind = (Kind::Float, Device::Cpu);
    let lengths = |iteration: i64| match iteration {
        0..60 => [256 + iteration * 89 % 257, 256 + iteration * 53 % 257],
        _ => [[500, 300], [300, 500]][iteration as usize % 2],
    };
    let iterate = |weights: &Tensor, iteration: i64| {
        let held = Tensor::full([550, 1024], 2.0, kind);
        let _ = held.double_value(&[0, 0]);
        descend_by_two(weights, iteration, lengths(iteration), |loss| *loss += held.double_value(&[549, 1023]))
    };
    let report = train(true, NARROW, iterate, 80);
    let are = |iterations: &[IterationReport], course| iterations.iter().all(|iteration| iteration.course == course);
    assert!(are(&report.latest[20..60], Driven::Watched), "{:?}", report.latest[39]);
    assert!(are(&report.latest[66..], Driven::Planned), "{:?}", report.latest[79]);
    assert!(report.latest[66..].iter().all(|iteration| iteration.deviation.is_none()), "{:?}", report.latest[79]);
}

/// One step down the loss of two batches of these lengths, and of a regularizer; returns it once `then` has had it.
fn descend_by_two(weights: &Tensor, iteration: i64, lengths: [i64; 2], then: impl Fn(&mut f64)) -> f64 {
    tch::manual_seed(iteration);
    let losses = lengths.map(|length| {
        let loss = loss_of(weights, Tensor::randn([length, 128], (Kind::Float, Device::Cpu)));
        loss.backward();
        loss.double_value(&[])
    });
    let mut loss = losses[0] + losses[1] + descend(weights, &(weights.square().sum(Kind::Float) * 1e-4));
    then(&mut loss);
    loss
}

/// What only the last of several passes uses, as the optimizer's state, goes once in an iteration and comes back once: each pass by
/// itself would send it away for its own sake.
#[test]
fn what_only_the_last_of_several_passes_uses() {
    let _running = one_at_a_time();
    const STATE_BYTES: u64 = 2 << 20;
    let kind = (Kind::Float, Device::Cpu);
    let make = || {
        let states: Vec<Tensor> = (0..8).map(|value| Tensor::full([128, 512], value, kind).neg().exp()).collect();
        (layers(128), Tensor::ones([128], kind), states)
    };
    let iterate = |(weights, row, states): &(Tensor, Tensor, Vec<Tensor>), iteration: i64| -> f64 {
        let (mut losses, mut gradient) = (0.0, None);
        for step in [89, 53, 71] {
            let length = 256 + iteration * step % 257;
            let loss = loss_of(weights, Tensor::full([length, 1], 1.0 + length as f64 / 512.0, kind) * row);
            let own = Tensor::run_backward(&[&loss], &[weights], false, false).remove(0);
            gradient = Some(match gradient.take() {
                None => own,
                Some(mut sum) => Tensor::f_add_(&mut sum, &own).unwrap(),
            });
            losses += loss.double_value(&[]);
        }
        tch::no_grad(|| {
            let decay = |state: &Tensor| state.shallow_clone().f_mul_scalar_(0.99).unwrap().mean(Kind::Float);
            let decayed = states.iter().map(decay).reduce(|sum, one| sum + one).unwrap();
            let _ = weights.shallow_clone().f_sub_(&(gradient.unwrap() * decayed * 0.1)).unwrap();
        });
        losses
    };
    session();
    let expected: Vec<f64> = {
        let model = make();
        (0..60).map(|iteration| iterate(&model, iteration)).collect()
    };
    let actions = ActionSet::SWAP;
    let planner = Planner { limits: Limits::evaluations(2_000), ..Planner::default() };
    let budget = Budget::bytes(session().live_bytes() + (10 << 19));
    let builder = Runtime::builder().actions(actions).planner(planner).budget(budget);
    let mut runtime = builder.link(Link::symmetric(2e8, 1_000)).build().unwrap();
    let model = make();
    let mut within = |iteration| {
        let _iteration = runtime.iteration();
        iterate(&model, iteration)
    };
    let losses: Vec<f64> = (0..60).map(&mut within).collect();
    let report = runtime.report();
    println!("{report}");
    assert_eq!(losses, expected);
    assert!(report.peak_bytes <= report.budget_bytes && report.over_budget_bytes == 0);
    let late = &report.latest[40..];
    assert!(late.iter().all(|iteration| iteration.course == Driven::Planned), "{:?}", late[19]);
    let offloaded_bytes: u64 = late.iter().map(|iteration| iteration.offloaded_bytes).sum();
    assert!(offloaded_bytes < late.len() as u64 * STATE_BYTES, "{offloaded_bytes} bytes have left in {}", late.len());
}

#[test]
fn a_branch_is_survived_within_the_budget_and_known_once_it_comes_again() {
    let _running = one_at_a_time();
    let courses: Vec<Course> =
        (0..20).map(|iteration| if iteration % 4 == 3 { Course::Branch(384) } else { Course::Train(384) }).collect();
    let reports = run(&courses, 0.5);
    assert!(reports[7].deviation.is_some(), "the first branch after a plan departs from it");
    assert!(reports[16..].iter().all(|report| report.deviation.is_none()), "{:?}", reports[19].deviation);
}

/// While a known program goes as planned, a GPU is not asked what each operator takes; a program that comes amid such iterations, and
/// when nobody expects it, is known all the same.
#[test]
fn a_branch_is_known_on_a_gpu_that_is_not_there() {
    const BRANCHES: [i64; 8] = [9, 13, 18, 23, 29, 33, 38, 42];
    let name = "a_branch_is_known_on_a_gpu_that_is_not_there";
    before_late_device(name, env!("CARGO_TARGET_TMPDIR"), 8, |name| {
        let (device, session, engines) = open(name);
        let runtime = |budget_bytes| {
            let builder = Runtime::builder().device(device).budget(Budget::bytes(budget_bytes));
            builder.engine(engines.engine(None).unwrap()).link(fast_link()).build().unwrap()
        };
        let iterate = |weights: &Tensor, iteration| {
            let batch = Tensor::full([512, 64], 0.01 * iteration as f64, (Kind::Float, device));
            // Gradients are left alone by the branch.
            match BRANCHES.contains(&iteration) {
                true => tch::no_grad(|| loss_of(weights, batch.sigmoid()).double_value(&[])),
                false => descend(weights, &loss_of(weights, batch)),
            }
        };
        let report = train_by(runtime, session, true, || layers_on(device, 64), 1 << 20, iterate, 46);
        let courses: Vec<_> = report.latest.iter().map(|iteration| iteration.course).collect();
        let is_known = |course: &Driven| matches!(course, Driven::Planned | Driven::Declined);
        // Another process that takes the host's time may have it seen once more before.
        assert!(courses[29..].iter().all(is_known), "{courses:?}");
    });
}

/// The first step makes gradients, others add to them, the last applies them and lets go of them: each is a program of its
/// own, whose plan may evict what another one has left.
#[test]
fn steps_that_accumulate_gradients() {
    let _running = one_at_a_time();
    let course = |iteration: usize| if iteration % 5 == 4 { Course::Apply(384) } else { Course::Accumulate(384) };
    let courses: Vec<Course> = (0..50).map(course).collect();
    let reports = run(&courses, 0.4);
    for (at, report) in reports.iter().enumerate().skip(25) {
        assert!(report.followed && report.course == Driven::Planned, "{at}: {report:?}");
        assert_eq!(Some(report.peak_bytes), report.predicted.map(|predicted| predicted.peak_bytes), "{at}");
    }
}

#[test]
fn data_in_memory_that_libtorch_did_not_allocate() {
    let _running = one_at_a_time();
    let reports = run(&[Course::Given(384); 12], 0.5);
    for report in &reports[6..] {
        assert!(report.followed && report.course == Driven::Planned, "{:?}", report.deviation);
        assert_eq!(Some(report.peak_bytes), report.predicted.map(|predicted| predicted.peak_bytes));
    }
}

#[test]
fn storages_that_operators_make_larger() {
    let _running = one_at_a_time();
    const BYTES: u64 = 4 * 256 * 256;
    let kind = (Kind::Float, Device::Cpu);
    let resident = session().live_bytes();
    let mut runtime = runtime(resident + 6 * BYTES);
    for _ in 0..8 {
        let _iteration = runtime.iteration();
        let idle: Vec<Tensor> = (1..4).map(|value| Tensor::full([256, 256], value, kind).exp()).collect();
        let into = Tensor::empty([0], kind);
        let _ = idle[0].add_out(&into, &idle[1]);
        let mut grown = Tensor::empty([0], kind);
        grown.resize_([256, 256]).copy_(&into);
        drop(into.relu().tanh());
        let sum = idle.iter().fold(grown, |sum, one| sum + one).sum(Kind::Float);
        assert!(f64::try_from(sum).unwrap() > 0.0);
    }
    let report = runtime.report();
    for iteration in &report.latest[4..] {
        assert!(iteration.followed && iteration.course == Driven::Planned, "{iteration:?}");
    }
    assert!(report.peak_bytes <= resident + 6 * BYTES);
}

/// The batches are there from the start, and each iteration takes another: what stands for the batch of the trace is never the
/// storage that it was before.
#[test]
fn batches_that_take_turns() {
    let _running = one_at_a_time();
    const BYTES: u64 = 4 * 256 * 256;
    let kind = (Kind::Float, Device::Cpu);
    session();
    let batches: Vec<Tensor> = (0..5).map(|value| Tensor::full([256, 256], value, kind)).collect();
    let resident = session().live_bytes();
    let mut runtime = runtime(resident + 4 * BYTES);
    for iteration in 0..12 {
        let batch = &batches[3 * iteration % 5];
        let _iteration = runtime.iteration();
        let idle: Vec<Tensor> = (1..5).map(|value| (batch + value).exp()).collect();
        let sum = idle.iter().fold(batch * 2, |sum, one| sum + one).sum(Kind::Double);
        let value = (3 * iteration % 5) as f64;
        let expected = 65536.0 * ((1..5).map(|more| (value + f64::from(more)).exp()).sum::<f64>() + 2.0 * value);
        assert!((f64::try_from(sum).unwrap() / expected - 1.0).abs() < 1e-5, "iteration {iteration}");
    }
    let report = runtime.report();
    for iteration in &report.latest[4..] {
        assert!(iteration.followed && iteration.course == Driven::Planned, "{iteration:?}");
    }
    assert!(report.peak_bytes <= resident + 4 * BYTES);
}

/// An evaluation, which uses one of several batches that are there all the time, and leaves what training needs unused: its plan may
/// evict that. Where one of those is used after all, or let go of, plans do without any of its size.
#[test]
fn what_an_iteration_does_not_use() {
    let _running = one_at_a_time();
    const BYTES: u64 = 4 * 256 * 256;
    let kind = (Kind::Float, Device::Cpu);
    session();
    let mut runtime = runtime(session().live_bytes() + 11 * BYTES);
    let make = |count: i64, rows: i64| -> Vec<Tensor> {
        (0..count).map(|value| Tensor::full([rows, 256], value, kind).exp()).collect()
    };
    let loss = |batch: &Tensor| {
        let rows = batch.repeat([2, 1]);
        let idle: Vec<Tensor> = (1..6).map(|value| (&rows + value).sin()).collect();
        f64::try_from(idle.iter().fold(rows, |sum, one| sum + one).sum(Kind::Double)).unwrap()
    };
    let expected: Vec<f64> = make(4, 128).iter().map(loss).collect();
    // Known to the runtime, since it makes them.
    let (batches, mut states) = {
        let _iteration = runtime.iteration();
        (make(4, 128), make(6, 256))
    };
    let mut run = |turns: &[usize]| {
        for &at in turns {
            let _iteration = runtime.iteration();
            assert_eq!(loss(&batches[at]), expected[at], "batch {at}");
        }
        let report = runtime.report();
        assert!(report.peak_bytes <= report.budget_bytes && report.over_budget_bytes == 0);
        report
    };
    let are_planned = |report: &Report| {
        for iteration in &report.latest[report.latest.len() - 6..] {
            assert!(iteration.followed && iteration.course == Driven::Planned, "{iteration:?}");
            assert!(iteration.offloaded_bytes >= BYTES, "six states, four batches and four more in room for eleven");
            assert_eq!(Some(iteration.peak_bytes), iteration.predicted.map(|predicted| predicted.peak_bytes));
        }
    };
    are_planned(&run(&[0; 10]));
    let in_turn = run(&[1, 3, 0, 2].repeat(5));
    are_planned(&in_turn);
    // Drift may be taken for what a busy machine takes, and has plans of its own.
    let for_others = |report: &Report| report.plans - report.replans;
    assert!(for_others(&in_turn) <= 3, "{in_turn}");
    drop(states.remove(4));
    let report = run(&[1, 3, 0, 2].repeat(2));
    assert_eq!(for_others(&report), for_others(&in_turn) + 1);
    assert!(
        states.iter().zip([0, 1, 2, 3, 5]).all(|(state, value)| *state == Tensor::full([256, 256], value, kind).exp())
    );
}

/// What plans evict unused stays where it is once an operator has shown its memory to others.
#[test]
fn what_is_not_used_and_may_not_be_evicted_any_more() {
    let _running = one_at_a_time();
    const BYTES: u64 = 4 * 256 * 256;
    let kind = (Kind::Float, Device::Cpu);
    let line = Budget::bytes(session().live_bytes() + 7 * BYTES);
    // The first to go is what was not used for longest.
    let swaps = ActionSet::SWAP;
    let mut runtime = Runtime::builder().baseline("lru").actions(swaps).budget(line).build().unwrap();
    let states: Vec<Tensor> = {
        let _iteration = runtime.iteration();
        (0..4).map(|value| Tensor::full([256, 256], value, kind).exp()).collect()
    };
    let evaluate = || {
        let idle: Vec<Tensor> = (1..5).map(|value| Tensor::full([256, 256], value, kind).sin()).collect();
        idle.into_iter().reduce(|sum, one| sum + one).unwrap()
    };
    let mut latest = |times: usize, run: &dyn Fn() -> Tensor| {
        for _ in 0..times {
            let _iteration = runtime.iteration();
            drop(run());
        }
        let report = runtime.report();
        assert!(report.peak_bytes <= report.budget_bytes);
        report.latest.last().unwrap().clone()
    };
    let planned = latest(8, &evaluate);
    assert!(planned.followed && planned.offloaded_bytes >= BYTES, "{planned:?}");
    for state in &states {
        latest(1, &|| state.to_mkldnn());
    }
    let departed = latest(1, &evaluate);
    let why = departed.deviation.as_deref().unwrap_or_default();
    assert!(why.contains("the plan cannot offload") && !departed.followed, "{departed:?}");
    let planned_anew = latest(4, &evaluate);
    assert!(planned_anew.followed && planned_anew.offloaded_bytes > 0, "{planned_anew:?}");
}

/// What is drawn before the forward pass is of another size every time, and made by other operators: what comes after it is the
/// program.
#[test]
fn batches_that_are_made_in_ways_of_their_own() {
    let _running = one_at_a_time();
    let kind = (Kind::Float, Device::Cpu);
    let iterate = |weights: &Tensor, iteration: i64| {
        tch::manual_seed(iteration);
        // Smaller every time: no plan made for another that makes it again lacks room for it.
        let mut batch = Tensor::randn([248 - 3 * iteration, 256], kind);
        if iteration % 3 == 0 {
            batch = batch.flip([1]);
        }
        let part = batch.slice(0, 0, 128, 1) * 0.5;
        drop(batch);
        descend(weights, &loss_of(weights, part))
    };
    for is_marked in [true, false] {
        let report = train(is_marked, WIDE, iterate, 40);
        let planned = report.latest[20..].iter().filter(|iteration| iteration.course == Driven::Planned);
        assert!(planned.clone().count() >= 15, "marked: {is_marked}: {:?}", report.latest[30]);
        let other = planned.clone().find(|iteration| !iteration.followed);
        assert!(other.is_none(), "marked: {is_marked}: {other:?}");
    }
}

/// Which of two numbers an operator reads depends on what they are, and so does which of them lives longer: it is the same program.
#[test]
fn numbers_that_are_chosen_by_their_values() {
    let _running = one_at_a_time();
    let iterate = |weights: &Tensor, iteration: i64| {
        tch::manual_seed(iteration);
        let batch = Tensor::randn([128, 256], (Kind::Float, Device::Cpu));
        let numbers = [0, 1].map(|row| batch.select(0, row).sum(Kind::Float));
        let [one, other] = [&numbers[0], &numbers[1]].map(|number| number.double_value(&[]));
        let [first, second] = numbers;
        let larger = if one > other { first } else { second };
        descend(weights, &(loss_of(weights, batch) * larger.sigmoid()))
    };
    let report = train(true, WIDE, iterate, 24);
    assert_eq!(programs_planned(&report), 1);
    let departed =
        report.latest[4..].iter().find(|iteration| iteration.course != Driven::Planned || !iteration.followed);
    assert!(departed.is_none(), "{departed:?}");
    let predicted = |iteration: &&IterationReport| iteration.predicted.is_some();
    assert!(report.latest[4..].iter().filter(predicted).count() < 20, "bytes are predicted where nothing differs");
}

/// What is too small to be evicted in some iterations is not in others, of which it is the same program all the same.
#[test]
fn sizes_about_which_nothing_is_evicted() {
    let _running = one_at_a_time();
    let kind = (Kind::Float, Device::Cpu);
    let iterate = |weights: &Tensor, iteration: i64| {
        tch::manual_seed(iteration);
        let kept = Tensor::randn([896 + iteration * 89 % 257], kind);
        let scale = (kept.tanh().exp() * &kept).mean(Kind::Float);
        drop(kept);
        descend(weights, &(loss_of(weights, Tensor::randn([128, 256], kind)) * scale.sigmoid()))
    };
    let report = train(true, WIDE, iterate, 40);
    let planned = report.latest[8..].iter().filter(|iteration| iteration.course == Driven::Planned).count();
    assert!(planned >= 30, "{planned}: {:?}", report.latest[30]);
}

/// A loop of which nothing repeats is recorded ever less, and is known all the same once something does.
#[test]
fn what_repeats_after_long() {
    const OTHERS: i64 = 150;
    let _running = one_at_a_time();
    let iterate = |weights: &Tensor, iteration: i64| {
        tch::manual_seed(iteration);
        let batch = Tensor::randn([64, 256], (Kind::Float, Device::Cpu));
        let layers = if iteration < OTHERS { 1 + iteration } else { 8 };
        let weights = weights.unbind(0);
        let hidden = (0..layers).fold(batch, |hidden, layer| hidden.matmul(&weights[layer as usize % 8]).tanh());
        let loss = hidden.square().mean(Kind::Float);
        loss.backward();
        loss.double_value(&[])
    };
    let report = train_by(runtime, session(), true, || layers(256), 40 << 18, iterate, OTHERS + 50);
    assert_eq!(programs_planned(&report), 1);
    assert!(report.latest[OTHERS as usize + 40..].iter().all(|iteration| iteration.followed), "{report}");
}

/// Layers that are left out by chance, as LayerDrop leaves them out: no two iterations are the same program, and what all have in common
/// is planned.
#[test]
fn layers_that_are_left_out() {
    const WHOLE: usize = 6;
    let _running = one_at_a_time();
    let left_out: Vec<[usize; 2]> = (0..8).flat_map(|one| (one + 1..8).map(move |other| [one, other])).collect();
    let new = || -> Vec<Tensor> {
        layers(256).detach().unbind(0).iter().map(|weights| weights.copy().set_requires_grad(true)).collect()
    };
    let iterate = |weights: &Vec<Tensor>, iteration: i64| {
        tch::manual_seed(iteration);
        let batch = Tensor::randn([256, 256], (Kind::Float, Device::Cpu));
        let without =
            (iteration as usize).checked_sub(WHOLE).map(|iteration| left_out[(5 * iteration) % left_out.len()]);
        let stays = |layer: &usize| without.is_none_or(|without| !without.contains(layer));
        let hidden = (0..8).filter(stays).fold(batch, |hidden, layer| hidden.matmul(&weights[layer]).tanh());
        let loss = hidden.square().mean(Kind::Float);
        loss.backward();
        weights.iter().filter(|weights| weights.grad().defined()).for_each(update);
        loss.double_value(&[])
    };
    let report = train_by(runtime, session(), true, new, 9 << 18, iterate, (WHOLE + left_out.len()) as i64);
    let (whole, in_part) = report.latest.split_at(WHOLE);
    assert!(whole[3..].iter().all(|iteration| iteration.followed));
    let other = in_part.iter().find(|iteration| iteration.course != Driven::Resumed || iteration.followed);
    assert!(other.is_none(), "{other:?}");
    let evictions = |iterations: &[IterationReport]| -> u64 {
        iterations.iter().map(|iteration| iteration.reactive_evictions).sum()
    };
    assert!(evictions(in_part) < evictions(&whole[1..2]), "all of them evict less than one that nobody plans");
}
