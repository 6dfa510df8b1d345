//! Operators that give other bits from the same inputs are found by their names, and no others.

use plimsoll_runtime::torch::{Recorder, Run, Session};
use tch::{Device, Kind, Tensor};

/// An iteration of two loops that differ in what one operator writes, which is no input of it.
fn found(values: [f64; 2]) -> Vec<String> {
    let session = Session::install().unwrap();
    for (run, value) in [(Run::First, values[0]), (Run::Second, values[1])] {
        tch::manual_seed(3);
        let ones = Tensor::ones([1000], (Kind::Float, Device::Cpu)).set_requires_grad(true);
        session.look_for_repeats(Some(run));
        let iteration = || {
            let dropped = ones.f_dropout(0.5, true)?;
            let filled = Tensor::f_zeros([1000], (Kind::Float, Device::Cpu))?.f_fill_(value)?;
            dropped.f_mul(&filled)?.f_relu()?.f_sum(Kind::Float)?.f_backward()
        };
        Recorder::new(session).iteration(iteration).unwrap().unwrap();
    }
    session.look_for_repeats(None);
    session.undeclared_effects()
}

#[test]
fn the_one_that_does_not_repeat_is_named_and_those_after_it_are_not() {
    assert_eq!(found([2.0, 2.0]), Vec::<String>::new());
    assert_eq!(found([2.0, 3.0]), ["aten::fill_.Scalar gave other bits from the same inputs"]);
}
