//! Operators that give other bits from the same inputs are found by their names, and no others: on the CPU, and by a digest of
//! its own on a CUDA device that is not there.

use plimsoll_runtime::torch::device::DeviceName;
use plimsoll_runtime::torch::{Audit, Recorder, Session};
use plimsoll_tests::stand_in::before_late_device;
use tch::{Kind, Tensor};

const SAME: &str = "gave other bits from the same inputs";

/// What is found in two runs of a loop that differ in what is no input of any operator: what one fills a tensor with, the
/// exponent of another, and how many there are.
fn found(device: DeviceName, runs: [(f64, f64, usize); 2]) -> Vec<String> {
    let device = device.open().unwrap();
    let session = Session::install_on(device).unwrap();
    for (audit, (filling, exponent, times)) in [Audit::FirstRun, Audit::SecondRun].into_iter().zip(runs) {
        tch::manual_seed(3);
        let twos = (Tensor::ones([1000], (Kind::Float, device)) * 2.0).set_requires_grad(true);
        session.audit(Some(audit));
        let iteration = || {
            let filled = Tensor::f_empty([1000], (Kind::Float, device))?.f_fill_(filling)?;
            let mut product = twos.f_dropout(0.5, true)?.f_mul(&filled)?;
            for _ in 0..times {
                product = product.f_relu()?;
            }
            // Of what nobody reads nothing is said.
            let unread = twos.f_pow_tensor_scalar(exponent)?;
            let _ = unread.f_empty_like()?.f_fill_(1.0)?;
            product.f_mul(&twos.f_detach()?.f_pow_tensor_scalar(exponent)?)?.f_sum(Kind::Float)?.f_backward()
        };
        Recorder::new(session).iteration(iteration).unwrap().unwrap();
    }
    session.audit(None);
    session.audit_findings()
}

/// Finds those that do not repeat, and no others.
fn look(device: DeviceName) {
    assert_eq!(found(device, [(2.0, 1.0, 1); 2]), Vec::<String>::new());
    assert_eq!(found(device, [(2.0, 1.0, 1), (3.0, 1.0, 1)]), [format!("aten::fill_.Scalar {SAME}")]);
    let power = format!("aten::pow.Tensor_Scalar {SAME}, or aten::mul.Tensor, which read them");
    assert_eq!(found(device, [(2.0, 1.0, 1), (2.0, 3.0, 1)]), [power]);
    let departed = found(device, [(2.0, 1.0, 1), (2.0, 1.0, 2)]);
    assert_eq!(departed, ["the two runs are not alike: the second had another operator, aten::relu"]);
}

#[test]
fn those_that_do_not_repeat_are_named_and_those_after_them_are_not() {
    look(DeviceName::Cpu);
}

#[test]
fn so_they_are_by_a_digest_that_the_device_takes() {
    before_late_device("so_they_are_by_a_digest_that_the_device_takes", env!("CARGO_TARGET_TMPDIR"), 0, look);
}
