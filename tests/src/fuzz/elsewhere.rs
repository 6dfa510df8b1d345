//! Another thread than the program's.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use plimsoll_runtime::torch::stand_by;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use tch::{TchError, Tensor};

/// Another thread.
pub(super) struct Elsewhere {
    jobs: Option<Sender<Job>>,
    /// How many it has still to do.
    left: Arc<AtomicUsize>,
    thread: Option<JoinHandle<()>>,
    seen: (Sender<Seen>, Receiver<Seen>),
}

type Job = Box<dyn FnOnce(&mut ChaCha8Rng) + Send>;
type Seen = Result<Tensor, TchError>;

impl Elsewhere {
    pub(super) fn start(seed: u64) -> Self {
        let (jobs, incoming) = channel::<Job>();
        let left = Arc::new(AtomicUsize::new(0));
        let count = Arc::clone(&left);
        let thread = thread::spawn(move || {
            stand_by();
            let mut random = ChaCha8Rng::seed_from_u64(seed);
            for job in incoming {
                job(&mut random);
                count.fetch_sub(1, Ordering::Release);
            }
        });
        Elsewhere { jobs: Some(jobs), left, thread: Some(thread), seen: channel() }
    }

    fn does(&self, job: impl FnOnce(&mut ChaCha8Rng) + Send + 'static) {
        self.left.fetch_add(1, Ordering::Relaxed);
        self.jobs.as_ref().expect("taken only when dropped").send(Box::new(job)).expect("the thread ends with this");
    }

    /// Some time later.
    pub(super) fn let_go(&self, tensor: Tensor) {
        self.does(move |random| {
            let until = Instant::now() + Duration::from_micros(random.random_range(0..100));
            while Instant::now() < until {
                std::hint::spin_loop();
            }
            drop(tensor);
        });
    }

    pub(super) fn look_at(&self, tensor: Tensor) {
        let seen = self.seen.0.clone();
        self.does(move |_| {
            let made = tensor.f_detach().and_then(|tensor| tensor.f_neg());
            drop(tensor);
            seen.send(made).expect("it is alive");
        });
    }

    /// Waits until nothing is left.
    pub(super) fn catch_up(&self) {
        while self.left.load(Ordering::Acquire) > 0 {
            thread::yield_now();
        }
    }

    /// What was made of all that it has looked at.
    pub(super) fn has_seen(&self) -> Result<Vec<Tensor>, TchError> {
        self.catch_up();
        self.seen.1.try_iter().collect()
    }
}

impl Drop for Elsewhere {
    fn drop(&mut self) {
        self.jobs = None;
        let _ = self.thread.take().map(JoinHandle::join);
    }
}
