//! Micro-batches whose residuals another stage group keeps for a while.

/// A micro-batch that waits elsewhere for its backward. The stage group that it belongs to sends what it keeps of
/// it, and gets it back later. Turns are numbered in lists: of a schedule, or of the runs that a stage group does; each
/// number says before which turn something happens.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ParkedMove {
    /// The micro-batch.
    pub microbatch: usize,
    /// The stage group that it belongs to.
    pub from: usize,
    /// The one that keeps it.
    pub to: usize,
    /// The owner begins to send it.
    pub sent: usize,
    /// Its memory is free there.
    pub left: usize,
    /// The owner asks for it again.
    pub returned: usize,
    /// The keeper begins to receive it.
    pub taken: usize,
    /// The keeper begins to send it back.
    pub given: usize,
    /// Its memory is free there, too.
    pub freed: usize,
}

impl ParkedMove {
    /// The same with turns of other lists: `place` gives the number of a turn of a stage group.
    pub fn placed(self, place: impl Fn(usize, usize) -> usize) -> Self {
        let [own, other] = [self.from, self.to].map(|group| move |turn| (group, turn));
        let place = |(group, turn)| place(group, turn);
        Self {
            sent: place(own(self.sent)),
            left: place(own(self.left)),
            returned: place(own(self.returned)),
            taken: place(other(self.taken)),
            given: place(other(self.given)),
            freed: place(other(self.freed)),
            ..self
        }
    }
}
