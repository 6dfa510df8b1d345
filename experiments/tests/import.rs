//! The promise: what another tool recorded becomes a trace that every command takes.

use std::io::Write;

use flate2::{Compression, write::GzEncoder};
use plimsoll_tests::bench;

/// The same small log that the runtime's own tests are about.
const LOG: &str = include_str!("../../runtime/tests/data/small.simrd.log");

#[test]
fn a_log_of_simrd_is_imported_planned_and_run_online_packed_or_not() {
    let bench = bench!("import-simrd");
    bench.write("small.simrd.log", LOG);
    let mut packed = GzEncoder::new(Vec::new(), Compression::default());
    packed.write_all(LOG.as_bytes()).unwrap();
    bench.write("small.simrd.log.gz", packed.finish().unwrap());
    for (file, out) in [("small.simrd.log", "plain.plimsoll"), ("small.simrd.log.gz", "packed.plimsoll")] {
        let call = bench.call(&format!("import simrd {file} --out {out} --family by-hand"));
        assert!(call.succeeded, "{}", call.stderr);
        assert!(call.stdout.contains("11 operators, 13 storages"), "{}", call.stdout);
    }
    let read = |name: &str| std::fs::read(bench.path(name)).unwrap();
    assert_eq!(read("plain.plimsoll"), read("packed.plimsoll"));
    let inspected = bench.call("inspect plain.plimsoll");
    assert!(inspected.stdout.contains("trace of small (family by-hand) on simrd"), "{}", inspected.stdout);

    let planned = bench.call("plan --trace plain.plimsoll --policy msps --budget 90% --link 8GB/s");
    assert!(planned.succeeded, "{}", planned.stderr);
    let refused = bench.refuse("plan --trace plain.plimsoll --policy msps --budget 90%");
    assert!(refused.contains("small was recorded on simrd: --link says how fast copies are there"), "{refused}");
    let online = bench.call("plan --trace plain.plimsoll --policy largest --budget 99% --online");
    assert!(online.succeeded, "{}", online.stderr);
    assert!(online.stdout.starts_with("largest online on small"), "{}", online.stdout);
    assert!(online.stdout.contains("1 evictions"), "{}", online.stdout);
}

#[test]
fn what_cannot_be_imported_or_run_online_is_refused_in_one_line() {
    let bench = bench!("import-refusals");
    bench.write("small.log", LOG);
    bench.write("broken.log", LOG.replacen("\"TIME\":\"100\"", "\"TIME\":\"soon\"", 1));
    let broken = bench.call("import simrd broken.log --out broken.plimsoll");
    assert!(!broken.succeeded && !bench.path("broken.plimsoll").exists());
    assert_eq!(broken.stderr, "plimsoll: broken.log: line 10: expected a whole number, found `soon`\n");
    let absent = bench.call("import simrd absent.log --out absent.plimsoll");
    assert!(!absent.succeeded && absent.stderr.starts_with("plimsoll: absent.log: "), "{}", absent.stderr);

    assert!(bench.call("import simrd small.log --out small.plimsoll").succeeded);
    let tight = bench.call("plan --trace small.plimsoll --policy dtr --budget 20% --online");
    assert!(!tight.succeeded && tight.stderr.contains("nothing was left to evict"), "{}", tight.stderr);
    let other = bench.call("plan --trace small.plimsoll --policy capuchin --budget 90% --online");
    let expected = "plimsoll: --policy capuchin: online there are dtr, dtr-eq, dtr-local, msps, lru, largest\n";
    assert_eq!((other.succeeded, other.stderr.as_str()), (false, expected));
}
