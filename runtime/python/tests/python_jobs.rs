//! PyTorch jobs in Python keep their bits within a budget, on the CPU and on a CUDA device that is not there.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::LazyLock;

use plimsoll_runtime::trace::Class;
use plimsoll_runtime::{Lineage, Trace};
use plimsoll_tests::python::{compiler, extension, has_headers, package, torch_packages};
use plimsoll_tests::stand_in::StandIn;
use serde_json::{Value, json};

/// The job.
const JOB: &str = "python_job.py";

/// What runs jobs: a process that has imported torch, of which theirs are forked.
struct Ground {
    /// It ends when this does.
    _process: Child,
    /// Where it listens.
    port: u16,
    /// Whether there is a CUDA device.
    has_cuda: bool,
}

/// None where tests go without Python.
static GROUND: LazyLock<Option<Ground>> = LazyLock::new(|| {
    let torch = torch_packages()?;
    let made = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let packages: Vec<PathBuf> = [package(&made.join("python")).to_owned()].into_iter().chain(torch).collect();
    // In place of NVIDIA's libraries, which torch is linked with; none where the libtorch in use needs none.
    let stand_in = StandIn::make(&made.join("stand-in"));
    let mut python = Command::new("python3");
    python.arg(root().join("tests/jobs/forked.py")).env("PYTHONPATH", std::env::join_paths(packages).unwrap());
    python.env("GOMP_SPINCOUNT", "0").envs(compiler(&compiled()));
    python.envs(stand_in.iter().flat_map(|stand_in| stand_in.late(0)));
    let mut process = python.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut port = String::new();
    BufReader::new(process.stdout.take().unwrap()).read_line(&mut port).unwrap();
    let port = port.trim().parse().expect("it says where it listens");
    Some(Ground { _process: process, port, has_cuda: stand_in.is_some() })
});

/// A program in Python that runs.
struct Job(TcpStream);

impl Job {
    /// What it prints, as JSON, or the last line of its complaint.
    fn end(self) -> Result<Value, String> {
        let printed = self.printed()?;
        Ok(serde_json::from_str(&printed).unwrap_or_else(|error| panic!("{error}: {printed}")))
    }

    /// The same, as it is.
    fn printed(mut self) -> Result<String, String> {
        let mut ended = String::new();
        self.0.read_to_string(&mut ended).unwrap();
        let ended: Value = serde_json::from_str(&ended).unwrap();
        let [printed, complaint] = ["printed", "complaint"].map(|what| ended[what].as_str().unwrap().to_owned());
        if ended["succeeded"] != true {
            return Err(complaint.lines().last().unwrap_or_default().to_owned());
        }
        Ok(printed)
    }
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

impl Ground {
    /// Starts one of the jobs with those flags.
    fn start(&self, program: &str, flags: &str, environment: &[(&str, &str)]) -> Job {
        let arguments: Vec<&str> = flags.split_whitespace().collect();
        let environment: BTreeMap<_, _> = environment.iter().copied().collect();
        let program = root().join("tests/jobs").join(program);
        let mut connection = TcpStream::connect(("127.0.0.1", self.port)).unwrap();
        let request = json!({ "program": program, "arguments": arguments, "environment": environment });
        writeln!(connection, "{request}").unwrap();
        Job(connection)
    }

    /// The job with those flags: what it prints, or the last line of its complaint.
    fn job(&self, flags: &str) -> Result<Value, String> {
        self.start(JOB, flags, &[]).end()
    }

    /// The job with those flags, by two processes that share its work.
    fn shared_job(&self, flags: &str) -> [Value; 2] {
        self.by_two(JOB, flags)
    }

    /// A program with those flags, run by two processes that can find each other.
    fn by_two(&self, program: &str, flags: &str) -> [Value; 2] {
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port().to_string();
        let meeting = [("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", &port), ("GLOO_SOCKET_IFNAME", "lo")];
        let start = |rank| {
            let place = [("WORLD_SIZE", "2"), ("RANK", rank)];
            self.start(program, flags, &[meeting.as_slice(), &place].concat())
        };
        ["0", "1"].map(start).map(|job| job.end().unwrap())
    }

    /// The devices that there are.
    fn devices(&self) -> impl Iterator<Item = &'static str> {
        ["cpu", "cuda"].into_iter().take(1 + usize::from(self.has_cuda))
    }

    /// 70 % of what the job with those flags takes.
    fn budget_bytes(&self, flags: &str) -> u64 {
        share(&self.job(&format!("{flags} --iterations 3 --budget 1TiB")).unwrap(), 70)
    }

    /// The reports of the job on `device` with those flags within 70 % of what it takes, and each time with more that only then
    /// make sense. It keeps every bit of the job that is left alone.
    fn reports_within_budget<const N: usize>(&self, device: &str, flags: &str, more: [&str; N]) -> [Value; N] {
        let flags = format!("--device {device} {flags}");
        // First, so that what is compiled once is compiled within a budget.
        let budget_bytes = self.budget_bytes(&flags);
        let untouched = self.job(&flags).unwrap();
        more.map(|more| {
            let job = self.job(&format!("{flags} --budget {budget_bytes}B {more}")).unwrap();
            assert_within_budget(&job, budget_bytes, &untouched);
            job["report"].clone()
        })
    }

    /// A program with those flags finds the same within each of `budgets` as left alone, though much is away. What it prints.
    fn finds_the_same<const N: usize>(
        &self,
        program: &str,
        flags: &str,
        environment: &[(&str, &str)],
        budgets: [&str; N],
    ) -> [Value; N] {
        let run = |budget: &str| self.start(program, &format!("{flags} {budget}"), environment).end().unwrap();
        let untouched = run("");
        budgets.map(|budget| {
            let within = run(budget);
            assert_found(&within, &untouched);
            within
        })
    }

    /// What a program finds that is left alone.
    fn alone(&self, program: &str, flags: &str) -> Value {
        self.start(program, flags, &[]).end().unwrap()
    }

    /// The same within a budget, by recomputing alone.
    fn recomputing(&self, program: &str, budget_and_flags: &str) -> Value {
        self.alone(program, &format!("--recompute-alone --budget {budget_and_flags}"))
    }

    /// The job on `device`, left alone and by each of `policies` within 70 % of what it takes.
    fn keeps_every_bit(&self, device: &str, policies: &[&str]) {
        let untouched = self.job(&format!("--device {device}")).unwrap();
        let kept = self.job(&format!("--device {device} --budget 1TiB")).unwrap();
        let budget_bytes = share(&kept, 70);
        for policy in policies {
            let job = self.job(&format!("--device {device} --budget {budget_bytes}B --policy {policy}")).unwrap();
            for what in ["losses", "parameters"] {
                assert_eq!(job[what], untouched[what], "{policy} on {device}");
                assert_eq!(kept[what], untouched[what], "within 1 TiB on {device}");
            }
            let report = &job["report"];
            assert!(report["peak_bytes"].as_u64() <= Some(budget_bytes), "{policy} on {device}: {report}");
            assert!(report["reactive_evictions"].as_u64() > Some(0), "the first iterations fit anyway: {report}");
            assert_planned(report);
            let last = report["latest"].as_array().unwrap().last().unwrap();
            assert_eq!(last["peak_bytes"], last["predicted"]["peak_bytes"], "{policy} on {device}");
        }
    }
}

/// So much of what a job took.
fn share(kept: &Value, percent: u64) -> u64 {
    kept["report"]["peak_bytes"].as_u64().unwrap() * percent / 100
}

/// Asserts that a job kept every bit of the one that was left alone.
fn assert_same(job: &Value, untouched: &Value) {
    for what in ["losses", "parameters", "operators"] {
        assert_eq!(job[what], untouched[what], "{what}: {}", job["report"]);
    }
}

/// Asserts that it stayed within its budget, too.
fn assert_within_budget(job: &Value, budget_bytes: u64, untouched: &Value) {
    assert_same(job, untouched);
    let report = &job["report"];
    assert!(report["peak_bytes"].as_u64() <= Some(budget_bytes), "more than {budget_bytes}: {report}");
}

/// Asserts that a job has found what the one that was left alone has, though much was away.
fn assert_found(within: &Value, untouched: &Value) {
    assert_eq!(within["found"], untouched["found"]);
    assert!(within["evictions"].as_u64() > Some(20), "little was away: {}", within["evictions"]);
}

/// Asserts that the last iteration was planned.
fn assert_planned(report: &Value) {
    let last = report["latest"].as_array().unwrap().last().unwrap();
    assert_eq!((&last["course"], &last["followed"]), (&"planned".into(), &true.into()), "{report}");
}

/// What the report says of each of the latest iterations.
fn latest<'a>(job: &'a Value, what: &'a str) -> impl Iterator<Item = &'a Value> {
    job["report"]["latest"].as_array().unwrap().iter().map(move |iteration| &iteration[what])
}

/// How many of the last iterations went as planned.
fn followed(report: &Value) -> usize {
    let followed = |iteration: &&Value| iteration["course"] == "planned" && iteration["followed"] == true;
    report["latest"].as_array().unwrap().iter().filter(followed).count()
}

fn ground() -> Option<&'static Ground> {
    GROUND.as_ref()
}

/// Where jobs keep what they have compiled.
fn compiled() -> PathBuf {
    Path::new(env!("CARGO_TARGET_TMPDIR")).join("inductor")
}

#[test]
fn a_job_keeps_every_bit_within_a_budget() {
    let Some(ground) = ground() else { return };
    let policy = root().join("configs/policies/bert.policy");
    ground.keeps_every_bit("cpu", &["dtr", "capuchin", policy.to_str().unwrap()]);
}

#[test]
fn a_job_on_a_cuda_device_does_too() {
    let Some(ground) = ground().filter(|ground| ground.has_cuda) else { return };
    ground.keeps_every_bit("cuda", &["dtr", "capuchin"]);
}

#[test]
fn iterations_of_a_job_are_found() {
    let Some(ground) = ground() else { return };
    for device in ground.devices() {
        // Parameters are updated after the backward pass, and within.
        for flags in ["--iterations 16", "--iterations 16 --hooked"] {
            let [report] = ground.reports_within_budget(device, flags, ["--detect"]);
            assert!(followed(&report) > 6, "{flags} on {device}: hardly any was planned: {report}");
        }
    }
}

#[test]
fn plans_reckon_with_what_a_job_may_take_of_the_hosts_memory() {
    let Some(ground) = ground() else { return };
    let flags = "--device cpu --iterations 16";
    let untouched = ground.job(flags).unwrap();
    let budget_bytes = ground.budget_bytes(flags);
    let within = |limit_bytes: u64| {
        let job = ground.job(&format!("{flags} --budget {budget_bytes}B --host-limit {limit_bytes}B")).unwrap();
        assert_within_budget(&job, budget_bytes, &untouched);
        assert_planned(&job["report"]);
        job["report"]["slow_tier_high_water_bytes"].as_u64().unwrap()
    };
    let taken_bytes = within(1 << 40);
    let limit_bytes = taken_bytes / 3;
    let taken_bytes = within(limit_bytes);
    assert!(taken_bytes > 0 && taken_bytes <= limit_bytes, "{taken_bytes} of {limit_bytes}");
}

/// What is there all the time alone exceeds the budget: some of it is away from one iteration to the next, whether parameters are
/// updated one by one or all in one operator.
#[test]
fn what_lasts_may_be_away_between_the_iterations_of_a_job() {
    let Some(ground) = ground() else { return };
    let jobs = [("cpu", "", &["--mark", "--detect"][..]), ("cuda", "--fused", &["--mark"])];
    for (device, update, begun) in
        jobs.into_iter().filter(|(device, ..)| ground.devices().any(|other| other == *device))
    {
        let flags = format!("--device {device} {update} --sequence 4 --iterations 20");
        let untouched = ground.job(&flags).unwrap();
        let budget_bytes = ground.budget_bytes(&flags);
        let refused = ground.job(&format!("{flags} --budget {budget_bytes}B")).unwrap_err();
        assert!(refused.contains("resident between iterations"), "{refused}");
        for how in begun {
            let job = ground.job(&format!("{flags} --budget {budget_bytes}B {how}")).unwrap();
            assert_same(&job, &untouched);
            let (last, others) = job["report"]["latest"].as_array().unwrap().split_last().unwrap();
            let exceeds = |iteration: &Value| iteration["peak_bytes"].as_u64() > Some(budget_bytes);
            assert!(!others.iter().any(exceeds) && exceeds(last), "{flags} {how}: {}", job["report"]);
            assert_eq!(others.last().unwrap()["course"], "planned", "{flags} {how}: {}", job["report"]);
        }
    }
}

/// By an optimizer that steps all parameters with one operator after another, as by one that has one operator for it.
#[test]
fn what_is_away_comes_in_once_for_several_operators_on_all_of_it() {
    let Some(ground) = ground().filter(|ground| ground.has_cuda) else { return };
    let flags = "--device cuda --sequence 4 --iterations 20";
    let budget_bytes = ground.budget_bytes(&format!("{flags} --fused"));
    let [once, several_times] = ["--fused", ""].map(|update| {
        let job = ground.job(&format!("{flags} {update} --mark --budget {budget_bytes}B")).unwrap();
        let (_, others) = job["report"]["latest"].as_array().unwrap().split_last().unwrap();
        assert_eq!(others.last().unwrap()["course"], "planned", "{update}: {}", job["report"]);
        others.last().unwrap()["offloaded_bytes"].as_f64().unwrap()
    });
    assert!(once > 0.0 && several_times < 1.5 * once, "{several_times} bytes leave, not {once}");
}

/// Within less than one of them uses.
#[test]
fn operators_on_lists_come_to_the_same_in_pieces() {
    let Some(ground) = ground() else { return };
    for device in ground.devices() {
        let run = |budget: &str| ground.start("list_operators.py", &format!("--device {device} {budget}"), &[]).end();
        assert_eq!(run("--budget 2.5MB").unwrap(), run("").unwrap(), "{device}");
    }
}

#[test]
fn what_is_held_without_a_plan_is_not_refused_because_of_one() {
    let Some(ground) = ground() else { return };
    let untouched = ground.alone("kept.py", "");
    for budget in ["942kB", "963kB", "1400kB"] {
        let within = ground.recomputing("kept.py", budget);
        assert_eq!(within["found"], untouched["found"], "{budget}");
        // Within the last one there are many.
        assert!(latest(&within, "course").any(|course| course == "planned") || budget != "1400kB");
    }
}

/// The plan under way is replaced by one that evicts nothing, or evicts more, only once its iteration is over.
#[test]
fn a_budget_that_is_set_in_the_middle_of_an_iteration_counts_from_the_next_one_on() {
    let Some(ground) = ground() else { return };
    let untouched = ground.alone("set_between.py", "");
    for (budget, other) in [(23_000_000, 380_000_000), (24_000_000, 23_000_000)] {
        let within = ground.recomputing("set_between.py", &format!("{budget} --usual {budget} --other {other}"));
        assert_eq!(within["found"], untouched["found"], "{budget}, {other}");
        let over_bytes = latest(&within, "over_budget_bytes").max_by_key(|bytes| bytes.as_u64());
        assert_eq!(over_bytes, Some(&json!(0)), "{budget}, {other}");
    }
}

#[test]
fn a_program_that_goes_on_in_place_of_one_with_gaps_reruns_its_own_operators() {
    let Some(ground) = ground() else { return };
    for seed in ["--seed 3", "--seed 4"] {
        let untouched = ground.alone("left_out.py", seed);
        let within = ground.recomputing("left_out.py", &format!("23333692 {seed}"));
        assert_eq!(within["found"], untouched["found"], "{seed}");
        for course in ["planned", "resumed"] {
            let times = latest(&within, "course").filter(|taken| *taken == course).count();
            assert!(times > 10, "{seed}: {course} {times} times");
        }
    }
}

#[test]
fn whoever_waits_for_the_runtime_lets_python_go_on() {
    let Some(ground) = ground() else { return };
    let untouched = ground.alone("python_storages.py", "");
    let within = ground.recomputing("python_storages.py", "12000000");
    assert_eq!(within["found"], untouched["found"]);
    assert!(within["report"]["reruns"].as_u64() > Some(100), "{}", within["report"]);
}

#[test]
fn what_python_has_an_object_of_is_known_to_be_let_go_of() {
    let Some(ground) = ground() else { return };
    let untouched = ground.alone("wrapped.py", "");
    for budget in ["21000000", "27222641"] {
        let within = ground.recomputing("wrapped.py", budget);
        assert_eq!(within["found"], untouched["found"], "{budget}");
        let went = latest(&within, "course").zip(latest(&within, "followed")).skip(8);
        let planned = went.filter(|&(course, followed)| course == "planned" && followed == true).count();
        assert!(planned > 11, "{budget}: {planned} of 16 were planned");
    }
}

#[test]
fn what_has_the_number_of_another_that_died_meanwhile_is_not_taken_for_it() {
    let Some(ground) = ground() else { return };
    let untouched = ground.alone("named_anew.py", "");
    for budget in ["27262976", "24117248"] {
        let within = ground.recomputing("named_anew.py", budget);
        assert_eq!(within["found"], untouched["found"], "{budget}");
        let deviations: Vec<&str> = latest(&within, "deviation").filter_map(Value::as_str).collect();
        assert!(!deviations.is_empty(), "there was to be less room than is planned for");
        let is_mistaken = |deviation: &&&str| deviation.contains("another storage stands");
        assert_eq!(deviations.iter().find(is_mistaken), None, "{budget}");
    }
}

#[test]
fn what_has_no_recipe_for_its_switches_are_too_many_is_not_run_again() {
    let Some(ground) = ground() else { return };
    let (untouched, within) = (ground.alone("switches.py", ""), ground.recomputing("switches.py", "4000000"));
    assert_eq!(within["found"], untouched["found"]);
    // Once there had been more of them.
    let reruns: u64 = latest(&within, "reruns").skip(2).filter_map(Value::as_u64).sum();
    assert!(reruns > 0, "what has one is: {}", within["report"]);
}

/// Else what an update wrote would be made again by all updates before it: hundreds of thousands of reruns.
#[test]
fn until_iterations_are_found_updates_are_not_run_again() {
    let Some(ground) = ground() else { return };
    let untouched = ground.alone("unmarked.py", "");
    for budget in ["6628084", "5307002"] {
        let within = ground.recomputing("unmarked.py", budget);
        assert_eq!(within["found"], untouched["found"], "{budget}");
        let [reruns, evictions] =
            ["reruns", "reactive_evictions"].map(|count| within["report"][count].as_u64().unwrap());
        assert!(evictions > 50 && (20..2_000).contains(&reruns), "{budget}: {evictions} evictions, {reruns} reruns");
    }
}

#[test]
fn passes_over_batches_that_were_there_before_are_told_apart() {
    let Some(ground) = ground() else { return };
    let untouched = ground.alone("passes.py", "");
    for budget in ["18MiB", "14MiB"] {
        let within = ground.recomputing("passes.py", budget);
        assert_eq!(within["found"], untouched["found"], "{budget}");
        let courses: Vec<_> = latest(&within, "course").skip(8).collect();
        let [planned, reactive] =
            ["planned", "reactive"].map(|course| courses.iter().filter(|taken| **taken == course).count());
        assert!(planned >= 8 && reactive <= 4, "{budget}: {planned} were planned, {reactive} reactive");
    }
}

#[test]
fn what_dies_while_it_is_made_again_is_missed_by_nobody() {
    let Some(ground) = ground() else { return };
    for room in ["", "--tight"] {
        let found = ground.start("let_go.py", room, &[]).end().unwrap();
        assert_eq!(found, json!({"runs": 2, "total": 524288.0, "held": 0}), "{room}");
    }
}

#[test]
fn other_threads_may_let_go_of_what_is_away() {
    let Some(ground) = ground() else { return };
    let run = |budget: &str| ground.start("consumers.py", &format!("--iterations 120 {budget}"), &[]).end().unwrap();
    let untouched = run("");
    // Within less, what is read for what is made again dies meanwhile, too.
    for budget in ["1.2MB", "0.6MB"] {
        let within = run(&format!("--budget {budget}"));
        assert_eq!(within["losses"], untouched["losses"]);
        assert!(within["evictions"].as_u64() > Some(100), "little was away: {}", within["evictions"]);
    }
}

#[test]
fn other_threads_find_what_is_away() {
    let Some(ground) = ground() else { return };
    let mut reruns = 0;
    for device in ground.devices() {
        let run = |flags: &str| {
            let flags = format!("--device {device} --iterations 20 {flags}");
            ground.start("bystanders.py", &flags, &[]).end().unwrap()
        };
        let untouched = run("");
        for manner in ["", "--detect"] {
            let within = run(&format!("--budget 2700000 {manner}"));
            for found in ["losses", "found", "looked"] {
                assert_eq!(within[found], untouched[found], "{found} on {device} {manner}");
            }
            let evictions = within["reactive_evictions"].as_u64();
            assert!(evictions > Some(30), "little was away on {device} {manner}: {evictions:?}");
            reruns += within["reruns"].as_u64().unwrap();
        }
    }
    assert!(reruns > 30, "little was made again: {reruns}");
}

#[test]
fn other_threads_of_a_job_go_on_while_it_is_planned() {
    let Some(ground) = ground() else { return };
    let budget_bytes = ground.budget_bytes("");
    let job = ground.job(&format!("--iterations 40 --budget {budget_bytes}B --beside")).unwrap();
    let turns: Vec<u64> = serde_json::from_value(job["turns_at_ends"].clone()).unwrap();
    assert!(turns.iter().any(|&turns| turns > 0), "{turns:?}: {}", job["report"]);
}

#[test]
fn a_job_may_train_in_another_thread_than_that_which_made_its_runtime() {
    let Some(ground) = ground() else { return };
    ground.reports_within_budget("cpu", "--elsewhere", ["", "--detect"]);
}

#[test]
fn what_a_job_forks_within_an_iteration_is_left_alone() {
    let Some(ground) = ground() else { return };
    for device in ground.devices() {
        let [report] = ground.reports_within_budget(device, "--iterations 6 --forks", [""]);
        assert!(report["reactive_evictions"].as_u64() > Some(0), "{device}: nothing was away: {report}");
    }
}

#[test]
fn operators_that_a_job_takes_over_in_python_keep_every_bit() {
    let Some(ground) = ground() else { return };
    for device in ground.devices() {
        ground.reports_within_budget(device, "--in-python", [""]).iter().for_each(assert_planned);
    }
}

#[test]
fn what_goes_past_the_dispatcher_keeps_every_bit() {
    let Some(ground) = ground() else { return };
    for device in ground.devices() {
        for flags in ["--past-dispatcher graphs", "--past-dispatcher lists"] {
            let reports = ground.reports_within_budget(device, flags, ["", "--policy dtr"]);
            reports.iter().for_each(assert_planned);
        }
    }
    for flags in ["--past-dispatcher addresses", "--past-dispatcher functions"] {
        ground.reports_within_budget("cpu", flags, [""]).iter().for_each(assert_planned);
    }
}

#[test]
fn what_is_shared_between_iterations_stays() {
    let Some(ground) = ground() else { return };
    for device in ground.devices() {
        ground.finds_the_same("lent.py", &format!("--device {device}"), &[], ["--budget 3.6MB"]);
    }
}

#[test]
fn what_python_copies_counts_and_is_evicted() {
    let Some(ground) = ground() else { return };
    for device in ground.devices() {
        let run = |budget: &str| ground.alone("copied.py", &format!("--device {device} {budget}"));
        let [untouched, all, within] = ["", "--budget 1GB", "--budget 4.2MB"].map(run);
        assert_eq!((&all["found"], &within["found"]), (&untouched["found"], &untouched["found"]), "{device}");
        let copied_bytes = untouched["found"]["copied_bytes"].as_u64().unwrap();
        assert!(all["report"]["peak_bytes"].as_u64() > Some(copied_bytes), "{device}: {all}");
        assert!(within["evictions"].as_u64() > Some(0), "{device}: {within}");
    }
}

#[test]
fn what_objects_hold_stays_and_reruns_do_not_warn_again() {
    let Some(ground) = ground() else { return };
    let budgets = ["--budget 5.9MB", "--budget 5.6MB", "--budget 6.4MB --recompute-alone"];
    for within in ground.finds_the_same("packed.py", "", &[], budgets) {
        assert!(within["evictions"].as_u64() > Some(0), "{within}");
    }
}

#[test]
fn a_job_of_several_streams_keeps_every_bit() {
    let Some(ground) = ground().filter(|ground| ground.has_cuda) else { return };
    let reports = ground.reports_within_budget("cuda", "--streams", ["", "--policy dtr", "--policy capuchin"]);
    reports.iter().for_each(assert_planned);
    let all = |what: &str| reports.iter().map(|report| report[what].as_u64().unwrap()).sum::<u64>();
    assert!(all("offloaded_bytes") > 0 && all("reruns") > 0, "nothing was moved, or nothing made again: {reports:?}");
}

#[test]
fn streams_are_waited_for_that_are_current_where_nobody_listens() {
    let Some(ground) = ground().filter(|ground| ground.has_cuda) else { return };
    let [within] = ground.finds_the_same("side_streams.py", "--device cuda", &[], ["--budget 1.2MB"]);
    assert_planned(&within["report"]);
    assert!(within["report"]["offloaded_bytes"].as_u64() > Some(0), "{}", within["report"]);
}

#[test]
fn gradients_that_add_up_across_streams_are_let_go_of_when_all_of_them_are_done() {
    let Some(ground) = ground().filter(|ground| ground.has_cuda) else { return };
    let budgets = ["--swap-alone --budget 800kB", "--swap-alone --budget 600kB", "--recompute-alone --budget 500kB"];
    let [first, second, recomputed] = ground.finds_the_same("joined.py", "--device cuda", &[], budgets);
    for swapped in [first, second] {
        assert!(swapped["report"]["prefetched_bytes"].as_u64() > Some(0), "{}", swapped["report"]);
    }
    assert!(recomputed["report"]["reruns"].as_u64() > Some(0), "{}", recomputed["report"]);
}

#[test]
fn nothing_moves_while_a_cuda_graph_is_captured() {
    let Some(ground) = ground().filter(|ground| ground.has_cuda) else { return };
    ground.finds_the_same("captured.py", "--device cuda", &[], ["--swap-alone --budget 2MB", "--budget 2MB"]);
}

#[test]
fn of_two_devices_a_model_stands_on_one_is_bounded_and_the_other_is_not() {
    let Some(ground) = ground().filter(|ground| ground.has_cuda) else { return };
    let run = |flags: &str| {
        let flags = format!("--device cuda {flags}");
        ground.start("two_devices.py", &flags, &[("STAND_IN_DEVICES", "2")]).end().unwrap()
    };
    let untouched = run("");
    let [swapped, dropped] = ["--budget 1.65MB", "--budget 1.75MB --recompute-alone"].map(run);
    for within in [&swapped, &dropped] {
        assert_eq!(within["found"], untouched["found"]);
        assert_planned(&within["report"]);
    }
    assert!(swapped["report"]["offloaded_bytes"].as_u64() > Some(0), "{}", swapped["report"]);
    assert!(dropped["report"]["reruns"].as_u64() > Some(0), "{}", dropped["report"]);
}

#[test]
fn operators_that_are_one_kernel_on_a_gpu_alone_find_what_they_use() {
    let Some(ground) = ground() else { return };
    for device in ground.devices() {
        let budgets = ["--budget 4MB", "--budget 3MB", "--budget 3MB --recompute-alone"];
        ground.finds_the_same("one_kernel.py", &format!("--device {device}"), &[], budgets);
    }
}

#[test]
fn what_a_job_saves_within_an_iteration_is_what_it_has_learned() {
    let Some(ground) = ground() else { return };
    for device in ground.devices() {
        for report in ground.reports_within_budget(device, "--iterations 4 --saves", ["", "--detect"]) {
            assert!(report["reactive_evictions"].as_u64() > Some(0), "{device}: nothing was away: {report}");
        }
    }
}

/// What a job runs within a budget is what it runs left alone, and may be learned from.
#[test]
fn a_job_saves_the_traces_of_what_it_runs() {
    let Some(ground) = ground() else { return };
    for device in ground.devices() {
        let folder = tempfile::tempdir().unwrap();
        let flags = format!("--device {device}");
        let kept = ground.job(&format!("{flags} --budget 1TiB")).unwrap();
        let budget_bytes = share(&kept, 70);
        let saves = format!("--save-traces {}", folder.path().join("traces").display());
        // On a busy machine it takes more of them to tell what operators take on a device.
        let job = ground.job(&format!("{flags} --iterations 20 --budget {budget_bytes}B {saves}")).unwrap();
        assert_planned(&job["report"]);
        let paths = job["traces"].as_array().unwrap();
        let [path] = &paths[..] else { panic!("{device}: {paths:?}") };
        let trace = Trace::load(path.as_str().unwrap()).unwrap();
        assert_eq!((trace.family.as_str(), device == "cpu"), ("mine", trace.device == "cpu"), "{}", trace.device);
        let last = kept["report"]["latest"].as_array().unwrap().last().unwrap();
        assert_eq!(last["peak_bytes"], Lineage::of(&trace).keep_all_peak_bytes(), "{device}");
        let bytes_of = |class: Class| -> u64 {
            trace.storages.iter().filter(|storage| storage.class == class).map(|storage| storage.bytes).sum()
        };
        let parameter_bytes = job["parameter_bytes"].as_u64().unwrap();
        // Of gradients those that it made, and those that the iteration before has left.
        for (class, times) in [(Class::Parameter, 1), (Class::Gradient, 2), (Class::OptimizerState, 2)] {
            let expected = times * parameter_bytes;
            assert!(bytes_of(class).abs_diff(expected) * 50 < expected, "{device}, {class:?}: {}", bytes_of(class));
        }
    }
}

#[test]
fn the_example_trains_within_its_budget_and_saves_its_traces() {
    let Some(ground) = ground() else { return };
    let folder = tempfile::tempdir().unwrap();
    let sizes = "--width 128 --layers 4 --batch 4 --iterations 8";
    let flags = format!("60MiB {sizes} --traces {}", folder.path().display());
    let printed = ground.start("../../runtime/python/examples/transformer.py", &flags, &[]).printed().unwrap();
    let path = printed.lines().last().unwrap();
    let trace = Trace::load(path).unwrap_or_else(|error| panic!("{error}: {printed}"));
    assert!(Lineage::of(&trace).keep_all_peak_bytes() > 60 << 20, "nothing had to be evicted: {printed}");
}

#[test]
fn compiled_layers_keep_every_bit() {
    let Some(ground) = ground() else { return };
    if !has_headers() {
        return;
    }
    if compiled().exists() {
        std::fs::remove_dir_all(compiled()).unwrap();
    }
    let [report] = ground.reports_within_budget("cpu", "--compiled", ["--policy dtr"]);
    assert_planned(&report);
    assert!(report["reruns"].as_u64() > Some(0), "{report}");
}

#[test]
fn a_packaged_model_finds_what_it_reads() {
    let Some(ground) = ground() else { return };
    if !has_headers() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let [package, cache] =
        ["teacher.pt2", "inductor"].map(|name| folder.path().join(name).to_str().unwrap().to_owned());
    let environment = [("PACKAGE", package.as_str()), ("TORCHINDUCTOR_CACHE_DIR", &cache)];
    ground.finds_the_same("packaged.py", "", &environment, ["--budget 440kB", "--budget 400kB"]);
}

#[test]
fn kernels_of_a_jobs_own_find_what_they_read_and_what_they_write_is_not_lost() {
    let Some(ground) = ground() else { return };
    if !has_headers() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let extension = extension("own_kernels", folder.path());
    // As apex names one of its own.
    std::os::unix::fs::symlink(&extension, folder.path().join("amp_C.so")).unwrap();
    let environment = [("EXTENSION", extension.to_str().unwrap())];
    ground.finds_the_same("own_kernels.py", "", &environment, ["--budget 450kB", "--budget 400kB"]);
}

#[test]
fn a_job_of_several_processes_keeps_every_bit_within_a_budget_of_each() {
    let Some(ground) = ground() else { return };
    // A part of each layer's parameters comes when the layer runs, and goes; all have all; some are split for good. Processes talk by
    // the host's memory: of a device's tensors the first alone can.
    let on_cpu = ["sharded", "replicated", "split"].map(|how| ("cpu", how, 45));
    let on_cuda = [("cuda", "sharded --iterations 16", 70)].into_iter().take(usize::from(ground.has_cuda));
    for (device, how, percent) in on_cpu.into_iter().chain(on_cuda) {
        let flags = format!("--device {device} --shared {how}");
        let untouched = ground.shared_job(&flags);
        let kept = ground.shared_job(&format!("{flags} --iterations 3 --budget 1TiB"));
        let budget_bytes = kept.iter().map(|kept| share(kept, percent)).max().unwrap();
        let jobs = ground.shared_job(&format!("{flags} --budget {budget_bytes}B"));
        for (job, untouched) in jobs.iter().zip(&untouched) {
            assert_within_budget(job, budget_bytes, untouched);
            // Now and then an iteration runs short of bytes that another process's messages hold for longer, the last one, too.
            let mut last = job["report"]["latest"].as_array().unwrap().iter().rev().take(4);
            assert!(last.any(|iteration| iteration["course"] == "planned"), "{device}, {how}: {}", job["report"]);
            assert!(followed(&job["report"]) > 3, "{device}, {how}: {}", job["report"]);
        }
    }
}

#[test]
fn what_processes_gather_is_what_they_have() {
    let Some(ground) = ground() else { return };
    let untouched = ground.by_two("gathers.py", "");
    // Now and then another process's messages hold some 30 kB for longer.
    for budget in ["250kB", "235kB"] {
        let within = ground.by_two("gathers.py", &format!("--budget {budget}"));
        within.iter().zip(&untouched).for_each(|(within, untouched)| assert_found(within, untouched));
    }
}

#[test]
fn storages_that_are_copied_are_known_again() {
    let Some(ground) = ground() else { return };
    for device in ground.devices() {
        let flags = format!("--device {device}");
        let [within] = ground.finds_the_same("deep_copies.py", &flags, &[], ["--budget 1MB"]);
        assert_planned(&within["report"]);
    }
}

#[test]
fn what_is_made_again_is_made_as_it_was() {
    let Some(ground) = ground() else { return };
    for within in ground.finds_the_same("made_again.py", "--recompute-alone", &[], ["--budget 3.8MB", "--budget 3.4MB"])
    {
        assert!(within["report"]["reruns"].as_u64() > Some(200), "{}", within["report"]);
    }
}

#[test]
fn what_is_run_again_is_what_ran() {
    let Some(ground) = ground() else { return };
    ground.finds_the_same("run_again.py", "--recompute-alone", &[], ["--budget 1.44MB"]);
}

#[test]
fn what_operators_do_not_say_is_known() {
    let Some(ground) = ground() else { return };
    ground.finds_the_same("unsaid.py", "", &[], ["--recompute-alone --budget 1.85MB", "--budget 1.7MB"]);
}

#[test]
fn a_handler_of_a_signal_finds_what_it_saves() {
    let Some(ground) = ground() else { return };
    for device in ground.devices() {
        let budgets = ["--budget 6MB", "--budget 4MB"];
        ground.finds_the_same("signalled.py", &format!("--device {device}"), &[], budgets);
    }
}

#[test]
fn what_interrupts_compiled_layers_that_run_again_waits() {
    let Some(ground) = ground() else { return };
    if !has_headers() {
        return;
    }
    let budgets = ["--budget 7MB", "--budget 12MB --recompute-alone"];
    for within in ground.finds_the_same("interrupted.py", "", &[], budgets) {
        assert!(within["evictions"].as_u64() > Some(0), "{within}");
    }
}

#[test]
fn finalizers_within_operators_of_other_threads_leave_what_these_use_free_to_go() {
    let Some(ground) = ground() else { return };
    for device in ground.devices() {
        ground.finds_the_same("beside.py", &format!("--device {device}"), &[], ["--budget 30MB"]);
    }
}

#[test]
fn what_was_there_before_the_runtime_is_given_back_to_whom_it_came_from() {
    let Some(ground) = ground() else { return };
    ground.finds_the_same("from_before.py", "", &[], ["--budget 700kB"]);
}

#[test]
fn random_numbers_are_drawn_again_where_they_were_and_nobody_waits_for_himself() {
    let Some(ground) = ground() else { return };
    for device in ground.devices() {
        let flags = format!("--device {device} --recompute-alone");
        for within in ground.finds_the_same("drawing.py", &flags, &[], ["--budget 2.5MB", "--budget 2MB"]) {
            assert!(within["report"]["reruns"].as_u64() > Some(0), "{device}: {within}");
        }
    }
}

#[test]
fn what_is_cast_within_an_operator_is_cast_again() {
    let Some(ground) = ground() else { return };
    for device in ground.devices() {
        let budgets = ["--budget 7.1MB --recompute-alone", "--budget 7MB --recompute-alone"];
        for within in ground.finds_the_same("cast.py", &format!("--device {device}"), &[], budgets) {
            assert!(within["report"]["reruns"].as_u64() > Some(0), "{device}: {within}");
        }
    }
}

#[test]
fn a_job_that_looks_at_what_it_runs_sees_its_own() {
    let Some(ground) = ground() else { return };
    let [untouched, within] = ["", "--budget 1GiB"].map(|budget| ground.alone("looked_at.py", budget));
    assert_eq!(untouched["found"][3], serde_json::json!(["tolist"]), "{untouched}");
    assert_eq!(within["found"], untouched["found"]);
}

#[test]
fn what_is_used_by_its_address_is_there() {
    let Some(ground) = ground() else { return };
    let budgets = ["--budget 200kB", "--budget 140kB", "--budget 345kB --recompute-alone"];
    ground.finds_the_same("by_address.py", "", &[], budgets);
}

#[test]
fn what_cannot_be_done_is_an_exception() {
    let Some(ground) = ground() else { return };
    for (flags, exception, words) in [
        ("--budget 1MiB", "torch.OutOfMemoryError", "the least feasible budget found so far"),
        ("--budget 2lights", "ValueError", "2lights"),
        ("--budget -1", "ValueError", "-1"),
        ("--budget 1GiB --device tpu", "ValueError", "unknown device `tpu`"),
        ("--budget 1GiB --policy missing.policy", "OSError", "missing.policy: No such file"),
        ("--budget 1GiB --policy dttr", "OSError", "nor is there a baseline of that name, only keep-all"),
    ] {
        let complaint = ground.job(flags).unwrap_err();
        assert!(complaint.starts_with(exception) && complaint.contains(words), "{flags}: {complaint}");
    }
}
