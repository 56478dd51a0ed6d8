//! Messages for the application's `tracing` subscriber.
//!
//! A subscriber may do anything: allocate tensors, launch, ask for devices. So a message about what happens under a lock
//! that this would need is held back until the lock is released.

use std::cell::RefCell;
use std::marker::PhantomData;

#[derive(Default)]
struct Held {
    /// How many [`Deferred`] there are on this thread.
    by: usize,
    messages: Vec<Box<dyn FnOnce()>>,
}

thread_local! {
    static HELD: RefCell<Held> = RefCell::default();
}

/// Holds back this thread's messages while it lives: the last one to be dropped emits them. To be made before the lock is
/// taken, and so dropped after it.
pub(crate) struct Deferred(PhantomData<*const ()>);

/// Holds back this thread's messages.
pub(crate) fn defer() -> Deferred {
    let _ = HELD.try_with(|held| held.borrow_mut().by += 1);
    Deferred(PhantomData)
}

impl Drop for Deferred {
    fn drop(&mut self) {
        let messages = HELD.try_with(|held| {
            let held = &mut *held.borrow_mut();
            held.by -= 1;
            if held.by == 0 { std::mem::take(&mut held.messages) } else { Vec::new() }
        });
        messages.unwrap_or_default().into_iter().for_each(|message| message());
    }
}

/// Has `message` call the subscriber, now or when nothing holds it back any more.
pub(crate) fn emit(message: impl FnOnce() + 'static) {
    let mut message = Some(message);
    let _ = HELD.try_with(|held| {
        let held = &mut *held.borrow_mut();
        if held.by > 0 {
            held.messages.extend(message.take().map(|message| Box::new(message) as Box<dyn FnOnce()>));
        }
    });
    if let Some(message) = message {
        message();
    }
}

#[cfg(test)]
mod tests {
    use std::rc::Rc;

    use super::*;

    #[test]
    fn messages_come_in_order_and_not_while_one_holds_them_back() {
        let said = Rc::new(RefCell::new(Vec::new()));
        let say = |number: i32| {
            let said = Rc::clone(&said);
            emit(move || said.borrow_mut().push(number));
        };
        say(1);
        {
            let _outer = defer();
            say(2);
            {
                let _inner = defer();
                say(3);
            }
            say(4);
            assert_eq!(*said.borrow(), [1]);
        }
        say(5);
        assert_eq!(*said.borrow(), [1, 2, 3, 4, 5]);
    }

    #[test]
    fn a_message_may_have_others_emitted() {
        let said = Rc::new(RefCell::new(Vec::new()));
        let to = Rc::clone(&said);
        let held = defer();
        emit(move || {
            let _held = defer();
            let after = Rc::clone(&to);
            emit(move || after.borrow_mut().push("second"));
            to.borrow_mut().push("first");
        });
        drop(held);
        assert_eq!(*said.borrow(), ["first", "second"]);
    }
}
