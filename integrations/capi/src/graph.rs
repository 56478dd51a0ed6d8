//! Graphs: commands that are recorded once and replayed.

use std::cell::RefCell;
use std::mem::ManuallyDrop;

use claystone::{Graph, GraphCapture};

use crate::device::device;
use crate::pointers::{borrow, handle, output, release};
use crate::pool::ClaystonePool;
use crate::status::{ClaystoneStatus, Fault, guard};

/// A handle on recorded commands of an OpenCL device.
pub struct ClaystoneGraph(Graph);

thread_local! {
    /// The capture of this thread. Never dropped at the thread's end, when other thread-local values may be gone.
    static CAPTURE: RefCell<Option<ManuallyDrop<GraphCapture>>> = const { RefCell::new(None) };
}

fn take_capture() -> Result<GraphCapture, Fault> {
    let capture = CAPTURE.take().ok_or_else(|| Fault::Argument("this thread is not capturing a graph".into()))?;
    Ok(ManuallyDrop::into_inner(capture))
}

/// Records from now on the kernels, fills and copies that this thread submits to its current stream of the pool's device, instead of
/// running them. Allocations come from the pool. Tensors that are made meanwhile have no values before the first replay. Reads, waits,
/// writes from the host, events and work on other streams of the device are errors; the capture continues after them. Other threads and
/// devices are not affected. Graphs may share a pool if they are replayed one after another in the order of their captures.
///
/// An error on the CPU device, which has no queue to record, and while this thread captures already.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn claystone_graph_capture_begin(pool: *const ClaystonePool) -> ClaystoneStatus {
    guard("claystone_graph_capture_begin", || {
        // SAFETY: the caller promises a live handle.
        let pool = unsafe { borrow(pool, "pool")? };
        CAPTURE.set(Some(ManuallyDrop::new(GraphCapture::begin(&pool.0)?)));
        Ok(())
    })
}

/// Ends this thread's capture and returns the graph, whose memory no other allocation gets before the graph is released.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn claystone_graph_capture_end(graph: *mut *mut ClaystoneGraph) -> ClaystoneStatus {
    guard("claystone_graph_capture_end", || {
        // SAFETY: the caller promises a pointer that is null or valid for writing.
        let graph = unsafe { output(graph, "graph")? };
        graph.write(handle(ClaystoneGraph(take_capture()?.end())));
        Ok(())
    })
}

/// Ends this thread's capture without a graph. No command has run, and the contents of tensors made meanwhile stay undefined.
#[unsafe(no_mangle)]
pub extern "C" fn claystone_graph_capture_abandon() -> ClaystoneStatus {
    guard("claystone_graph_capture_abandon", || {
        drop(take_capture()?);
        Ok(())
    })
}

/// Gets whether this thread is capturing a graph of a device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn claystone_graph_is_capturing(number: i32, capturing: *mut bool) -> ClaystoneStatus {
    guard("claystone_graph_is_capturing", || {
        // SAFETY: the caller promises a pointer that is null or valid for writing.
        let capturing = unsafe { output(capturing, "capturing")? };
        capturing.write(Graph::is_capturing(device(number)?));
        Ok(())
    })
}

/// Submits the graph's commands to the stream that was current at the capture, and returns without waiting. The commands use the
/// memory of the tensors that were used at the capture: to change an input, write to its tensor. Random numbers and optimiser steps
/// advance as by calls.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn claystone_graph_replay(graph: *const ClaystoneGraph) -> ClaystoneStatus {
    guard("claystone_graph_replay", || {
        // SAFETY: the caller promises a live handle.
        Ok(unsafe { borrow(graph, "graph")? }.0.replay()?)
    })
}

/// Gets the number of commands of a replay: kernels, fills and copies.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn claystone_graph_commands(
    graph: *const ClaystoneGraph,
    commands: *mut usize,
) -> ClaystoneStatus {
    guard("claystone_graph_commands", || {
        // SAFETY: the caller promises a live handle, and a pointer that is valid for writing.
        let (graph, commands) = unsafe { (borrow(graph, "graph")?, output(commands, "commands")?) };
        commands.write(graph.0.commands());
        Ok(())
    })
}

/// Releases a graph after its replays are complete; null is ignored.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn claystone_graph_release(graph: *mut ClaystoneGraph) {
    // SAFETY: the caller promises an unreleased handle.
    unsafe { release("claystone_graph_release", graph) }
}
