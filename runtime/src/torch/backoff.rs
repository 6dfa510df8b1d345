//! Which iterations are worth recording of a loop of which nothing repeats.

/// Iterations in a row that were recorded in vain, each alike none of those that wait, before some are not.
const PATIENCE: u32 = 128;
/// How many are recorded between two pauses then.
const STRETCH: u32 = 16;
/// The first pause, and the longest: each is twice the one before.
const PAUSES: [u32; 2] = [32, 512];

/// Exponential backoff: a loop that never repeats pays ever less for being recorded, and one that begins to is found out all the same.
#[derive(Debug, Default)]
pub(super) struct Backoff {
    in_vain: u32,
    pause: u32,
    /// Iterations of nothing known that still go unrecorded.
    left: u32,
}

impl Backoff {
    /// Whether the next iteration is to be recorded, should it be nothing known.
    pub(super) fn records(&self) -> bool {
        self.left == 0
    }

    /// An iteration was nothing known: says whether it was recorded, and whether it was alike another.
    pub(super) fn note(&mut self, was_recorded: bool, is_alike: bool) {
        if is_alike {
            *self = Backoff::default();
        } else if !was_recorded {
            self.left = self.left.saturating_sub(1);
        } else {
            self.in_vain += 1;
            if self.in_vain == PATIENCE {
                self.in_vain -= STRETCH;
                self.pause = (2 * self.pause).clamp(PAUSES[0], PAUSES[1]);
                self.left = self.pause;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// How many of so many iterations are recorded, none of which is alike another.
    fn recorded(backoff: &mut Backoff, iterations: u32) -> u32 {
        let iterations = (0..iterations).map(|_| {
            let records = backoff.records();
            backoff.note(records, false);
            u32::from(records)
        });
        iterations.sum()
    }

    #[test]
    fn what_never_repeats_is_recorded_ever_less() {
        let mut backoff = Backoff::default();
        assert_eq!(recorded(&mut backoff, PATIENCE), PATIENCE);
        for pause in [32, 64, 128, 256, 512, 512] {
            assert_eq!(recorded(&mut backoff, pause), 0);
            assert_eq!(recorded(&mut backoff, STRETCH), STRETCH);
        }
        assert_eq!(recorded(&mut backoff, 512), 0);
        assert!(backoff.records());
    }

    #[test]
    fn what_repeats_once_is_recorded_again() {
        let mut backoff = Backoff::default();
        recorded(&mut backoff, PATIENCE + 32);
        backoff.note(true, true);
        assert_eq!(recorded(&mut backoff, PATIENCE), PATIENCE);
        assert_eq!(recorded(&mut backoff, 33), 1, "the first pause again");
    }
}
