//! Messages for the application's `tracing` subscriber.
//!
//! A subscriber may do anything: allocate tensors, launch kernels, open devices. Therefore a message is deferred while
//! this thread holds a lock that the subscriber might need.

use std::cell::RefCell;
use std::marker::PhantomData;

/// Deferred messages, and the number of guards that defer them.
#[derive(Default)]
struct DeferredMessages {
    /// The number of live [`Deferred`] guards on this thread.
    guards: usize,
    messages: Vec<Box<dyn FnOnce()>>,
}

thread_local! {
    static DEFERRED_MESSAGES: RefCell<DeferredMessages> = RefCell::default();
}

/// A guard that defers this thread's messages: dropping the thread's last guard emits them. Create the guard before taking such a
/// lock, so that the guard is dropped after the lock is released.
pub(crate) struct Deferred(PhantomData<*const ()>);

/// Defers this thread's messages until the guard is dropped.
pub(crate) fn defer() -> Deferred {
    let _ = DEFERRED_MESSAGES.try_with(|held| held.borrow_mut().guards += 1);
    Deferred(PhantomData)
}

impl Drop for Deferred {
    fn drop(&mut self) {
        let messages = DEFERRED_MESSAGES.try_with(|held| {
            let held = &mut *held.borrow_mut();
            held.guards -= 1;
            if held.guards == 0 { std::mem::take(&mut held.messages) } else { Vec::new() }
        });
        messages.unwrap_or_default().into_iter().for_each(|message| message());
    }
}

/// Calls `message`, which passes a message to the subscriber: now, or when the thread's last [`Deferred`] guard is dropped.
pub(crate) fn emit(message: impl FnOnce() + 'static) {
    let mut message = Some(message);
    let _ = DEFERRED_MESSAGES.try_with(|held| {
        let held = &mut *held.borrow_mut();
        if held.guards > 0 {
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
    fn messages_are_deferred_and_keep_their_order() {
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
    fn a_message_may_emit_messages() {
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
