//! An environment that stays on its thread while a learner plays it from others.
//!
//! A training loop belongs to the thread that runs it, and cannot be sent to those of a learner. So this thread answers
//! questions, and what is sent is a pair of channels.

use std::sync::mpsc::{Receiver, Sender, channel};

use plimsoll_env::environment::{Environment, Observation, StepResult};
use plimsoll_env::real::RealError;
use plimsoll_runtime::Choice;

/// What a learner asks for.
enum Question {
    Reset(u64),
    Step(Choice),
}

/// What it is answered.
enum Answer {
    Reset(Observation),
    Step(StepResult),
}

/// The learner's end: an environment that can be sent to any thread.
pub struct Served {
    questions: Sender<Question>,
    answers: Receiver<Result<Answer, RealError>>,
}

impl Served {
    fn ask(&mut self, question: Question) -> Result<Answer, RealError> {
        self.questions.send(question).expect("the environment is served until the learner is done");
        self.answers.recv().expect("every question is answered")
    }
}

impl Environment for Served {
    type Error = RealError;

    fn reset(&mut self, seed: u64) -> Result<Observation, RealError> {
        match self.ask(Question::Reset(seed))? {
            Answer::Reset(observation) => Ok(observation),
            Answer::Step(_) => unreachable!("a reset is answered by an observation"),
        }
    }

    fn step(&mut self, choice: Choice) -> Result<StepResult, RealError> {
        match self.ask(Question::Step(choice))? {
            Answer::Step(result) => Ok(result),
            Answer::Reset(_) => unreachable!("a step is answered by its result"),
        }
    }
}

/// Serves `environment` from this thread while `learn` runs on another, and returns what that comes to.
///
/// # Panics
///
/// If `learn` does.
pub fn serve<E, T, F>(environment: &mut E, learn: F) -> T
where
    E: Environment<Error = RealError>,
    T: Send,
    F: FnOnce(Served) -> T + Send,
{
    let (questions, asked) = channel();
    let (answer, answers) = channel();
    // Should the environment panic, the learner is told that no answer comes.
    std::thread::scope(move |scope| {
        let learning = scope.spawn(move || learn(Served { questions, answers }));
        for question in asked {
            let answered = match question {
                Question::Reset(seed) => environment.reset(seed).map(Answer::Reset),
                Question::Step(choice) => environment.step(choice).map(Answer::Step),
            };
            if answer.send(answered).is_err() {
                break;
            }
        }
        learning.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}
