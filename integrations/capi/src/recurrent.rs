//! Recurrent layers over whole sequences, and the recordings from which their gradients are computed later.

use claystone::nn::{Gru, Lstm, PackedSequence, Rnn, RnnOptions};
use claystone::ops::Recorded;
use claystone::{Tensor, no_grad};

use crate::call::write_results;
use crate::multi::{ClaystoneTensors, borrow_tensors};
use crate::pointers::{array, borrow, handle, optional, outputs, release};
use crate::status::{ClaystoneStatus, Fault, guard};
use crate::tensor::ClaystoneTensor;

/// The cell of a recurrent layer.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ClaystoneCell {
    /// Long short-term memory.
    Lstm = 0,
    /// Gated recurrent unit.
    Gru = 1,
    /// Elman cell with tanh.
    RnnTanh = 2,
    /// Elman cell with ReLU.
    RnnRelu = 3,
}

/// Stacked recurrent layers and their inputs: PyTorch's `torch.lstm`, `torch.gru`, `torch.rnn_tanh` and `torch.rnn_relu`, without
/// dropout.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct ClaystoneRecurrent {
    /// A ClaystoneCell.
    pub cell: i32,
    /// The number of layers.
    pub num_layers: usize,
    /// Whether each layer also processes the sequence backwards.
    pub bidirectional: bool,
    /// Whether the layers have biases.
    pub bias: bool,
    /// If not 0, the number of features that LSTM's hidden state is projected to.
    pub proj_size: usize,
    /// True if input and output are `[N, L, ..]` instead of `[L, N, ..]`.
    pub batch_first: bool,
    /// For packed sequences, whose input is `[rows, ..]`: the number of rows of each step. Otherwise null.
    pub batch_sizes: *const i64,
    /// The number of steps of packed sequences; otherwise 0.
    pub batch_size_count: usize,
    /// The input.
    pub input: *const ClaystoneTensor,
    /// The initial hidden states, `[layers * directions, N, H]`.
    pub hx: *const ClaystoneTensor,
    /// The initial cell states of an LSTM; null for other cells.
    pub cx: *const ClaystoneTensor,
    /// For each layer and direction: `weight_ih`, `weight_hh`, the two biases if there are any, then `weight_hr` of a projected LSTM.
    pub parameters: ClaystoneTensors,
}

/// A recorded forward call, from which gradients are computed.
pub struct ClaystoneRecording(pub(crate) Recorded);

/// Runs the layers. Returns the last layer's hidden states at all steps, then the final states of all layers.
fn run_cell(
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
    macro_rules! run_layers {
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
            let (out, (h, c)) = run_layers!(Lstm::from_parameters(parameters, options)?, Some(&state))?;
            return Ok(vec![out, h, c]);
        }
        ClaystoneCell::Gru => run_layers!(Gru::from_parameters(parameters, options)?, Some(states[0]))?,
        ClaystoneCell::RnnTanh => run_layers!(Rnn::from_parameters(parameters, options)?, Some(states[0]))?,
        ClaystoneCell::RnnRelu => run_layers!(Rnn::from_parameters(parameters, options)?.with_relu(), Some(states[0]))?,
    };
    Ok(vec![out, last])
}

/// Runs recurrent layers.
///
/// `results` has room for three handles, which the caller owns: the hidden states of the last layer at all steps, the final hidden states of
/// all layers, and an LSTM's final cell states (null for other cells). `wanted` has a flag for the input, `hx`, an LSTM's `cx`, and
/// each parameter; a flag other than 0 means that its gradient will be requested. `recording` then receives a handle, which the caller
/// owns; it is null if `wanted` is null or all 0.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn claystone_recurrent(
    layers: *const ClaystoneRecurrent,
    wanted: *const u8,
    results: *mut *mut ClaystoneTensor,
    recording: *mut *mut ClaystoneRecording,
) -> ClaystoneStatus {
    guard("claystone_recurrent", || {
        // SAFETY: the caller promises a struct whose pointers are null or valid as the crate's documentation requires, and
        // destinations that are null or valid for writing.
        let (given, batch_sizes, tensors, outputs, recording) = unsafe {
            let given = borrow(layers, "layers")?;
            let sizes = array(given.batch_sizes, given.batch_size_count, "batch_sizes")?;
            let states = [given.hx, given.cx].map(|t| t.as_ref().map(|t| &t.0));
            let parameters = borrow_tensors(&given.parameters, "a parameter")?;
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
            // SAFETY: the caller promises as many flags as there are tensors.
            false => unsafe { array(wanted, tensors.len(), "wanted")? }.iter().map(|&flag| flag != 0).collect(),
        };
        let is_recorded = wanted.contains(&true);
        let (made, kept) = if is_recorded {
            let recorded = Recorded::new(&tensors, &wanted, |tensors| run_cell(cell, options, batch_sizes, tensors))?;
            (recorded.results(), handle(ClaystoneRecording(recorded)))
        } else {
            (no_grad(|| run_cell(cell, options, batch_sizes, &tensors))?, std::ptr::null_mut())
        };
        match recording {
            Some(place) => _ = place.write(kept),
            // SAFETY: `kept` was created above, and no other code has the handle.
            None => unsafe { release("claystone_recurrent", kept) },
        }
        write_results(made.into_iter().map(Some).chain([None]), outputs);
        Ok(())
    })
}

/// Computes the gradients of a recorded call. May be called any number of times.
///
/// `grad_outputs` has a gradient for each of the first results, of the same shape, dtype and device; null for a result without one.
/// `gradients` has room for one handle per flag of `wanted`, in that order, which the caller owns: null for gradients that were not
/// requested or do not exist. Each gradient has its own storage. The arguments of the recorded call must not have changed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn claystone_recording_backward(
    recording: *const ClaystoneRecording,
    grad_outputs: *const *const ClaystoneTensor,
    grad_output_count: usize,
    gradients: *mut *mut ClaystoneTensor,
    tensor_count: usize,
) -> ClaystoneStatus {
    guard("claystone_recording_backward", || {
        // SAFETY: the caller promises a live handle and arrays; each entry of `grad_outputs` is null or a live handle.
        let (recording, grad_outputs, outputs) = unsafe {
            let handles = array(grad_outputs, grad_output_count, "grad_outputs")?;
            let grad_outputs: Vec<Option<&Tensor>> = handles.iter().map(|&t| t.as_ref().map(|t| &t.0)).collect();
            (borrow(recording, "recording")?, grad_outputs, outputs(gradients, tensor_count, "gradients")?)
        };
        let found = recording.0.gradients(&grad_outputs)?;
        if outputs.len() != found.len() {
            return Err(Fault::Argument(format!("there is room for {} gradients of {}", outputs.len(), found.len())));
        }
        write_results(found, outputs);
        Ok(())
    })
}

/// Releases a handle on a recording and the tensors it keeps; null is ignored.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn claystone_recording_release(recording: *mut ClaystoneRecording) {
    // SAFETY: the caller upholds this function's contract.
    unsafe { release("claystone_recording_release", recording) }
}
