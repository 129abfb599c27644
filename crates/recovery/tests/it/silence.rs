//! Two ends of a connection with random delays, pauses and losses: a host that is not heard any more is named
//! in time, one that lives is not, and an agent that is cut off has ended its ranks before it is named.

use std::time::Duration;

use phalanx_recovery::{ABSENT, ALONE, BEAT, LOST, Silence};

use crate::simulation::Dice;

const CONNECTIONS: u64 = 2000;

/// Ends look this often at most, and a beat is on its way for so long at most.
const LOOK: u64 = 50;
const DELAY: u64 = 100;

/// One end: it beats and looks, except while it is away.
struct End {
    silence: Silence,
    heard: u64,
    next_beat: u64,
    next_look: u64,
    /// From when to when it does nothing; what comes meanwhile is read afterwards.
    away: [u64; 2],
    /// When beats of the other end arrive.
    coming: Vec<u64>,
    patience: Duration,
    named: Option<u64>,
}

impl End {
    fn new(patience: Duration, away: [u64; 2]) -> Self {
        let silence = Silence::begin(Duration::ZERO);
        let coming = Vec::new();
        Self { silence, heard: 0, next_beat: 0, next_look: 0, away, coming, patience, named: None }
    }

    fn is_away(&self, now: u64) -> bool {
        (self.away[0]..self.away[1]).contains(&now)
    }

    /// Does what is due at this millisecond; gives whether a beat leaves.
    fn moment(&mut self, now: u64, dice: &mut Dice) -> bool {
        if self.is_away(now) {
            return false;
        }
        if self.coming.iter().any(|&at| at <= now) {
            self.coming.retain(|&at| at > now);
            self.heard = now;
        }
        if now >= self.next_look && self.named.is_none() {
            self.next_look = now + 1 + dice.roll(LOOK);
            let ms = Duration::from_millis;
            let quiet = self.silence.look(ms(self.heard), ms(now), self.patience);
            self.named = quiet.map(|_| now);
        }
        let beats = now >= self.next_beat;
        if beats {
            self.next_beat = now + BEAT.as_millis() as u64;
        }
        beats
    }
}

#[test]
fn a_silent_host_is_named_in_time_and_a_living_one_is_not() {
    let most = |patience: Duration| patience.as_millis() as u64 + DELAY + LOOK;
    let (mut named, mut kept, mut returned) = (0, 0, 0);
    for seed in 1..=CONNECTIONS {
        let mut dice = Dice::new(seed);
        let end = 20_000;
        // Nothing, a cut cable, or a host that stands still; and either end may be away for a while before.
        let cut = [u64::MAX, 8000 + dice.roll(8000)][dice.roll(2) as usize];
        let frozen = [u64::MAX, 8000 + dice.roll(8000)][dice.roll(2) as usize];
        let pause = |dice: &mut Dice, longest| {
            let start = 1000 + dice.roll(3000);
            [start, start + dice.roll(longest)]
        };
        let long = dice.once_in(2);
        let away = pause(&mut dice, if long { 4000 } else { ABSENT.as_millis() as u64 });
        let mut coordinator = End::new(LOST, away);
        let mut agent = End::new(ALONE, [frozen, u64::MAX]);
        for now in 0..end {
            let delay = dice.roll(DELAY);
            if coordinator.moment(now, &mut dice) && now < cut {
                agent.coming.push(now + delay);
            }
            // A coordinator that was away too long is left by its agent, and hears that the connection is closed.
            if agent.moment(now, &mut dice) && now < cut && agent.named.is_none() {
                coordinator.coming.push(now + delay);
            }
            if agent.named.is_some() && cut == u64::MAX {
                break;
            }
        }
        let gone = cut.min(frozen);
        let left_early = agent.named.is_some_and(|at| at < gone);
        if left_early {
            // Only because its coordinator was away for longer than it has patience.
            assert!(away[1] - away[0] + BEAT.as_millis() as u64 + DELAY > 1500, "seed {seed}");
            returned += 1;
        } else if gone == u64::MAX {
            assert_eq!((coordinator.named, agent.named), (None, None), "seed {seed}");
            kept += 1;
        } else {
            let at = coordinator.named.expect("a silent host is named");
            assert!(at >= gone + LOST.as_millis() as u64 - 300, "seed {seed}: {at} {gone}");
            assert!(at <= gone + most(LOST), "seed {seed}: named at {at}, silent since {gone}");
            if frozen > cut.saturating_add(most(ALONE)) {
                let ended = agent.named.expect("an agent that hears nothing ends its ranks");
                assert!(ended <= cut + most(ALONE), "seed {seed}");
                assert!(ended < at, "seed {seed}: ranks run until {ended}, lost at {at}");
            }
            named += 1;
        }
    }
    assert!(named > 900 && kept > 300 && returned > 50, "{named} {kept} {returned}");
}
