//! Recurrent layers through all their steps, and recordings: what the gradients of a call are computed from later.

use claystone::nn::{Gru, Lstm, PackedSequence, Rnn, RnnOptions};
use claystone::ops::Recorded;
use claystone::{Tensor, no_grad};

use crate::call::give;
use crate::multi::{ClaystoneTensors, list};
use crate::pointers::{array, borrow, handle, optional, outputs, release};
use crate::status::{ClaystoneStatus, Fault, guard};
use crate::tensor::ClaystoneTensor;

/// What a recurrent layer computes in a step.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ClaystoneCell {
    /// Long short-term memory.
    Lstm = 0,
    /// The gated recurrent unit.
    Gru = 1,
    /// The hyperbolic tangent of a sum.
    RnnTanh = 2,
    /// A sum where it is above 0.
    RnnRelu = 3,
}

/// Recurrent layers on top of each other, and what they are given: PyTorch's `torch.lstm`, `torch.gru`, `torch.rnn_tanh` and
/// `torch.rnn_relu`, without dropout.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct ClaystoneRecurrent {
    /// A ClaystoneCell.
    pub cell: i32,
    /// How many layers.
    pub num_layers: usize,
    /// Whether each layer also goes through the sequence from its end.
    pub bidirectional: bool,
    /// Whether there are biases.
    pub bias: bool,
    /// Where not 0, LSTM's hidden state is projected to so many features.
    pub proj_size: usize,
    /// Whether input and output are `[N, L, ..]` instead of `[L, N, ..]`.
    pub batch_first: bool,
    /// Of packed sequences, whose input is `[rows, ..]`, how many of these rows each step has; null for others.
    pub batch_sizes: *const i64,
    /// How many steps that are; 0 for others.
    pub batch_size_count: usize,
    /// The input.
    pub input: *const ClaystoneTensor,
    /// The hidden states to begin with, `[layers * directions, N, H]`.
    pub hx: *const ClaystoneTensor,
    /// LSTM's cell states to begin with; null for others.
    pub cx: *const ClaystoneTensor,
    /// Of each layer and each of its directions `weight_ih`, `weight_hh`, then the two biases, then LSTM's `weight_hr`, as far as there
    /// are such.
    pub parameters: ClaystoneTensors,
}

/// What the gradients of a call are computed from.
pub struct ClaystoneRecording(pub(crate) Recorded);

/// The results of layers: the hidden states of the last one, then what all of them end with.
fn run(
    cell: ClaystoneCell,
    options: RnnOptions,
    batch_sizes: Option<&[usize]>,
    tensors: &[Option<&Tensor>],
) -> claystone::Result<Vec<Tensor>> {
    let is_lstm = cell == ClaystoneCell::Lstm;
    let given: Vec<&Tensor> = tensors.iter().flatten().copied().collect();
    let (states, parameters) = given[1..].split_at(if is_lstm { 2 } else { 1 });
    let parameters = parameters.iter().map(|t| t.shallow_clone()).collect();
    let packed = batch_sizes.map(|sizes| PackedSequence::new(given[0], sizes.to_vec())).transpose()?;
    macro_rules! through {
        ($layers:expr, $state:expr) => {{
            let layers = $layers;
            match &packed {
                Some(packed) => {
                    layers.run_packed(packed, $state).map(|(out, state)| (out.data().shallow_clone(), state))
                }
                None => layers.run(given[0], $state),
            }
        }};
    }
    let (out, last) = match cell {
        ClaystoneCell::Lstm => {
            let state = (states[0].shallow_clone(), states[1].shallow_clone());
            let (out, (h, c)) = through!(Lstm::from_parameters(parameters, options)?, Some(&state))?;
            return Ok(vec![out, h, c]);
        }
        ClaystoneCell::Gru => through!(Gru::from_parameters(parameters, options)?, Some(states[0]))?,
        ClaystoneCell::RnnTanh => through!(Rnn::from_parameters(parameters, options)?, Some(states[0]))?,
        ClaystoneCell::RnnRelu => through!(Rnn::from_parameters(parameters, options)?.with_relu(), Some(states[0]))?,
    };
    Ok(vec![out, last])
}

/// Runs recurrent layers.
///
/// `results` has room for three handles, which are the caller's: the hidden states of the last layer at all steps, the hidden states that
/// all layers end with, and LSTM's cell states likewise, null for others. `wanted` has a flag for the input, for `hx`, for LSTM's `cx`,
/// and for each parameter: not 0 where its gradient will be asked for. Then `recording` is written a handle that is the caller's; null
/// where `wanted` is null or all 0.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn claystone_recurrent(
    layers: *const ClaystoneRecurrent,
    wanted: *const u8,
    results: *mut *mut ClaystoneTensor,
    recording: *mut *mut ClaystoneRecording,
) -> ClaystoneStatus {
    guard("claystone_recurrent", || {
        // SAFETY: a struct whose pointers are null, or good as the crate's documentation says; places for the results.
        let (given, batch_sizes, tensors, outputs, recording) = unsafe {
            let given = borrow(layers, "layers")?;
            let sizes = array(given.batch_sizes, given.batch_size_count, "batch_sizes")?;
            let states = [given.hx, given.cx].map(|t| t.as_ref().map(|t| &t.0));
            let parameters = list(&given.parameters, "a parameter")?;
            let mut tensors = vec![Some(&borrow(given.input, "input")?.0), states[0]];
            tensors.extend((given.cell == ClaystoneCell::Lstm as i32).then_some(states[1]));
            tensors.extend(parameters.into_iter().map(Some));
            (given, sizes, tensors, outputs(results, 3, "results")?, optional(recording))
        };
        let cells = [ClaystoneCell::Lstm, ClaystoneCell::Gru, ClaystoneCell::RnnTanh, ClaystoneCell::RnnRelu];
        let Some(cell) = cells.into_iter().find(|cell| *cell as i32 == given.cell) else {
            return Err(Fault::Argument(format!("{} is no ClaystoneCell", given.cell)));
        };
        if tensors.iter().any(Option::is_none) {
            return Err(Fault::Argument("hx is null, or cx where the cell is LSTM's".into()));
        }
        let batch_sizes = batch_sizes.iter().map(|&size| usize::try_from(size)).collect::<Result<Vec<usize>, _>>();
        let batch_sizes = batch_sizes.map_err(|_| Fault::Argument("a batch size is negative".into()))?;
        let batch_sizes = Some(&batch_sizes[..]).filter(|sizes| !sizes.is_empty());
        let options = RnnOptions {
            num_layers: given.num_layers,
            bias: given.bias,
            batch_first: given.batch_first,
            dropout: 0.0,
            bidirectional: given.bidirectional,
            proj_size: given.proj_size,
        };
        let wanted: Vec<bool> = match wanted.is_null() {
            true => vec![false; tensors.len()],
            // SAFETY: as many flags as there are tensors, says the caller.
            false => unsafe { array(wanted, tensors.len(), "wanted")? }.iter().map(|&flag| flag != 0).collect(),
        };
        let is_recorded = wanted.contains(&true);
        let (made, kept) = if is_recorded {
            let recorded = Recorded::new(&tensors, &wanted, |tensors| run(cell, options, batch_sizes, tensors))?;
            let mut made = recorded.results();
            // What one direction of others than LSTM gives is what backward reads, and the caller may write into his.
            if cell != ClaystoneCell::Lstm {
                made[0] = no_grad(|| {
                    let rows = if given.batch_first { made[0].transpose(0, 1)? } else { made[0].shallow_clone() };
                    let copied = rows.empty_like()?.copy_(&rows)?.shallow_clone();
                    if given.batch_first { copied.transpose(0, 1) } else { Ok(copied) }
                })?;
            }
            (made, handle(ClaystoneRecording(recorded)))
        } else {
            (no_grad(|| run(cell, options, batch_sizes, &tensors))?, std::ptr::null_mut())
        };
        match recording {
            Some(place) => _ = place.write(kept),
            // SAFETY: made above, and given to nobody.
            None => unsafe { release("claystone_recurrent", kept) },
        }
        give(made.into_iter().map(Some).chain([None]), outputs);
        Ok(())
    })
}

/// The gradients of the tensors of a recorded call, as often as one likes.
///
/// `grad_outputs` has one gradient for each of the first results, of its shape, dtype and device; null for one that has none.
/// `gradients` has room for a handle for each tensor, in the order of the flags that were given, which are the caller's: null where none was
/// wanted or none flows. Each has a storage of its own. What the call was given must not have changed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn claystone_recording_backward(
    recording: *const ClaystoneRecording,
    grad_outputs: *const *const ClaystoneTensor,
    grad_output_count: usize,
    gradients: *mut *mut ClaystoneTensor,
    tensor_count: usize,
) -> ClaystoneStatus {
    guard("claystone_recording_backward", || {
        // SAFETY: a handle that lives and arrays, says the caller, of which the entries of `grad_outputs` are null or handles that live.
        let (recording, grad_outputs, outputs) = unsafe {
            let handles = array(grad_outputs, grad_output_count, "grad_outputs")?;
            let grad_outputs: Vec<Option<&Tensor>> = handles.iter().map(|&t| t.as_ref().map(|t| &t.0)).collect();
            (borrow(recording, "recording")?, grad_outputs, outputs(gradients, tensor_count, "gradients")?)
        };
        let found = recording.0.gradients(&grad_outputs)?;
        if outputs.len() != found.len() {
            return Err(Fault::Argument(format!("there is room for {} gradients of {}", outputs.len(), found.len())));
        }
        give(found, outputs);
        Ok(())
    })
}

/// Gives a handle on a recording back, and what it kept. Null is none.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn claystone_recording_release(recording: *mut ClaystoneRecording) {
    // SAFETY: the caller's promise.
    unsafe { release("claystone_recording_release", recording) }
}
