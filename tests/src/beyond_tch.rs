//! What programs in C++ and Python do with libtorch and `tch` cannot: autocast, optimizers that step all parameters in one operator,
//! and errors that do not say where they were raised.

use std::ffi::{CStr, c_char, c_int, c_void};

use tch::{TchError, Tensor, nn};

unsafe extern "C" {
    fn plimsoll_tests_forget_origins() -> *const c_char;
    fn plimsoll_tests_autocast(enter: c_int) -> *const c_char;
    fn plimsoll_tests_blend(
        tensors: *const *const c_void,
        count: usize,
        number: f64,
        first: *mut *mut c_void,
    ) -> *const c_char;
    fn plimsoll_tests_foreach_step(
        parameters: *const *const c_void,
        gradients: *const *const c_void,
        velocities: *const *const c_void,
        count: usize,
        rate: f64,
    ) -> *const c_char;
    fn plimsoll_tests_fused_step(
        parameters: *const *const c_void,
        gradients: *const *const c_void,
        means: *const *const c_void,
        squares: *const *const c_void,
        steps: *const *const c_void,
        count: usize,
        rate: f64,
    ) -> *const c_char;
}

/// # Safety
///
/// `message` is null or a nul-terminated string.
unsafe fn checked(message: *const c_char) -> Result<(), TchError> {
    if message.is_null() {
        return Ok(());
    }
    // SAFETY: as the caller promises.
    Err(TchError::Torch(unsafe { CStr::from_ptr(message) }.to_string_lossy().into_owned()))
}

fn pointers(tensors: &[Tensor]) -> Vec<*const c_void> {
    tensors.iter().map(|tensor| tensor.as_ptr().cast()).collect()
}

/// From now on errors of libtorch do not say where they were raised, which takes longer to find out than a small program runs. Before
/// anything else is done with it.
pub fn forget_origins() {
    // SAFETY: no other thread raises errors yet.
    unsafe { checked(plimsoll_tests_forget_origins()) }.expect("it sets a function");
}

/// CPU autocast to bf16, until it is dropped.
pub struct Autocast(());

impl Autocast {
    /// Switches it on for this thread.
    pub fn enter() -> Result<Self, TchError> {
        // SAFETY: sets flags of this thread.
        unsafe { checked(plimsoll_tests_autocast(1)) }?;
        Ok(Autocast(()))
    }
}

impl Drop for Autocast {
    fn drop(&mut self) {
        // SAFETY: as above. Leaving cannot fail.
        let _ = unsafe { checked(plimsoll_tests_autocast(0)) };
    }
}

/// Of each tensor a number times itself and the tangent of that, by operators that act on all of them, in place and not; the first, with
/// the means of the others.
pub fn blend(tensors: &[Tensor], number: f64) -> Result<Tensor, TchError> {
    let tensors = pointers(tensors);
    let mut first = std::ptr::null_mut();
    // SAFETY: tch's pointers are those of tensors; what is written where there is no error is one that nobody else owns.
    unsafe {
        checked(plimsoll_tests_blend(tensors.as_ptr(), tensors.len(), number, &mut first))?;
        Ok(Tensor::from_ptr(first.cast()))
    }
}

/// Who steps the parameters. What it keeps of them is made when it first does.
pub enum Update {
    /// `tch`'s optimizer, one after the other.
    Tch,
    /// Momentum, after all gradients were clipped to a norm of at most one, in several operators that each act on all parameters; with
    /// their velocities.
    Foreach(Vec<Tensor>),
    /// AdamW, all in one operator.
    Fused(Option<Moments>),
}

/// What AdamW keeps of each parameter.
pub struct Moments {
    means: Vec<Tensor>,
    squares: Vec<Tensor>,
    steps: Vec<Tensor>,
}

impl Moments {
    fn of(parameters: &[Tensor]) -> Self {
        let zeros = || parameters.iter().map(Tensor::zeros_like).collect();
        let steps = parameters.iter().map(|parameter| parameter.new_zeros([], (tch::Kind::Float, parameter.device())));
        Moments { means: zeros(), squares: zeros(), steps: steps.collect() }
    }
}

impl Update {
    /// Steps the parameters; at this rate, where `optimizer` is not asked.
    pub fn step(&mut self, optimizer: &mut nn::Optimizer, parameters: &[Tensor], rate: f64) -> Result<(), TchError> {
        let _no_grad = tch::no_grad_guard();
        match self {
            Update::Tch => {
                optimizer.step();
                Ok(())
            }
            Update::Foreach(velocities) => {
                if velocities.is_empty() {
                    velocities.extend(parameters.iter().map(Tensor::zeros_like));
                }
                foreach_step(parameters, velocities, rate)
            }
            Update::Fused(moments) => {
                fused_step(parameters, moments.get_or_insert_with(|| Moments::of(parameters)), rate)
            }
        }
    }
}

fn foreach_step(parameters: &[Tensor], velocities: &[Tensor], rate: f64) -> Result<(), TchError> {
    let gradients: Vec<Tensor> = parameters.iter().map(Tensor::grad).collect();
    let [parameters, gradients, velocities] = [parameters, &gradients[..], velocities].map(pointers);
    assert_eq!(parameters.len(), velocities.len());
    // SAFETY: tch's pointers are those of tensors, and there are as many of each.
    unsafe {
        checked(plimsoll_tests_foreach_step(
            parameters.as_ptr(),
            gradients.as_ptr(),
            velocities.as_ptr(),
            parameters.len(),
            rate,
        ))
    }
}

fn fused_step(parameters: &[Tensor], moments: &Moments, rate: f64) -> Result<(), TchError> {
    let gradients: Vec<Tensor> = parameters.iter().map(Tensor::grad).collect();
    let Moments { means, squares, steps } = moments;
    let [parameters, gradients, means, squares, steps] =
        [parameters, &gradients, means, squares, steps].map(|tensors: &[Tensor]| pointers(tensors));
    assert_eq!(parameters.len(), means.len());
    // SAFETY: tch's pointers are those of tensors, and there are as many of each.
    unsafe {
        checked(plimsoll_tests_fused_step(
            parameters.as_ptr(),
            gradients.as_ptr(),
            means.as_ptr(),
            squares.as_ptr(),
            steps.as_ptr(),
            parameters.len(),
            rate,
        ))
    }
}
