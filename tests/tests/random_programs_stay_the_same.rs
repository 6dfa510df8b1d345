//! A slice of the fuzzer: random programs under random plans give the bits of their untouched selves.

use plimsoll_tests::fuzz::{Mode, Program, Verdict};
use plimsoll_tests::one_at_a_time;

const PROGRAMS: usize = 200;

#[test]
fn under_random_plans() {
    let _running = one_at_a_time();
    tch::set_num_threads(1);
    let (mut same, mut all_followed, mut all_reruns, mut all_bytes) = (0, 0, 0, 0);
    for seed in 0.. {
        let program = Program::random(seed);
        match program.check(Mode::Planned) {
            Verdict::Unlawful => {}
            Verdict::Same { followed, reruns, swapped_bytes } => {
                same += 1;
                all_followed += followed;
                all_reruns += reruns;
                all_bytes += swapped_bytes;
            }
            Verdict::Different(what) => panic!("{what}\n{}", program.minimised(Mode::Planned)),
        }
        if same == PROGRAMS {
            break;
        }
    }
    println!("{same} programs, {all_followed} iterations followed, {all_reruns} reruns, {all_bytes} bytes swapped");
    assert!(all_followed > PROGRAMS && all_reruns > 1_000 && all_bytes > 1 << 20, "the programs test too little");
}
