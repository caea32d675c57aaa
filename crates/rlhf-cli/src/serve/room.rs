//! The room for the bodies of all requests together.

use std::sync::Arc;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Most bytes of a request's body.
pub(super) const BODY_LIMIT: usize = 16 << 20;

/// Most bytes of the bodies of all requests that are read, wait or are responded to: token ids and texts take many times their size.
const BODIES_LIMIT: usize = BODY_LIMIT;

/// The least number of bytes that a body counts as.
const LEAST_BODY: usize = 4 << 10;

/// The room for the bodies of requests.
pub(super) fn body_room() -> Arc<Semaphore> {
    Arc::new(Semaphore::new(BODIES_LIMIT))
}

/// The room that a body has taken, until it is dropped.
pub(super) struct Room {
    all: Arc<Semaphore>,
    taken: Option<OwnedSemaphorePermit>,
    /// Bytes that are taken and not used yet.
    left: usize,
}

impl Room {
    pub(super) fn of(all: &Arc<Semaphore>) -> Self {
        Self { all: Arc::clone(all), taken: None, left: 0 }
    }

    /// Takes room for `bytes` more bytes. Returns whether there is some.
    pub(super) fn take(&mut self, bytes: usize) -> bool {
        if bytes > self.left {
            let more = (bytes - self.left).clamp(LEAST_BODY, BODIES_LIMIT);
            let permits = u32::try_from(more).unwrap_or(u32::MAX);
            let Ok(taken) = Arc::clone(&self.all).try_acquire_many_owned(permits) else { return false };
            match &mut self.taken {
                Some(before) => before.merge(taken),
                none => *none = Some(taken),
            }
            self.left += more;
        }
        self.left -= bytes.min(self.left);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bodies_of_all_requests_together_are_bounded() {
        let all = body_room();
        let take = |bytes: usize| {
            let mut room = Room::of(&all);
            room.take(bytes).then_some(room)
        };
        let mut first = take(BODIES_LIMIT / 2).unwrap();
        let second = take(BODIES_LIMIT / 2 - LEAST_BODY).unwrap();
        let third = take(1).unwrap();
        assert!(take(1).is_none() && !first.take(1), "a small body counts too");
        drop(first);
        assert!(take(BODIES_LIMIT / 2 + 1).is_none());
        drop((second, third));
        // A body of the greatest size in parts of any size.
        let mut whole = Room::of(&all);
        assert!((0..BODY_LIMIT / 4096).all(|_| whole.take(4096)) && !whole.take(1));
    }
}
