//! Fused elementwise formulas: programs of elementwise operations that run in one launch.

use std::ffi::c_char;
use std::fmt::Write;

use claystone::device::total_launches;
use claystone::ops::{Accepts, Expr, PreparedMap, ROWS};
use claystone::{Scalar, no_grad};

use crate::memory::ClaystoneBytes;
use crate::multi::{ClaystoneTensors, borrow_tensors};
use crate::pointers::{array, borrow, handle, output, release, text};
use crate::status::{ClaystoneStatus, Fault, guard};

/// A program of elementwise operations with one or several results.
pub struct ClaystoneFormula(PreparedMap);

/// Parses programs. Values are numbered in the order in which operations compute them.
struct Parser {
    inputs: usize,
    scalars: usize,
    values: Vec<Expr>,
}

impl Parser {
    fn operand(&self, word: &str) -> Result<Expr, Fault> {
        let (inputs, scalars) = (self.inputs, self.scalars);
        let unknown =
            || Fault::Argument(format!("{word:?} is no operand of a formula of {inputs} inputs and {scalars} scalars"));
        let index = |digits: &str, count: usize| digits.parse().ok().filter(|&i: &usize| i < count).ok_or_else(unknown);
        match word.split_at_checked(1) {
            Some(("x", digits)) => Ok(Expr::input(index(digits, self.inputs)?)),
            Some(("s", digits)) => Ok(Expr::scalar(index(digits, self.scalars)?)),
            Some(("v", digits)) => Ok(self.values[index(digits, self.values.len())?].clone()),
            _ => word.parse().map(Expr::constant).map_err(|_| unknown()),
        }
    }

    fn operation(&self, word: &str, operands: &[Expr]) -> Result<Expr, Fault> {
        let (name, derivative) = match word.split_once('\'') {
            Some((name, of)) => (name, Some(of)),
            None => (word, None),
        };
        let Some(row) = ROWS.iter().find(|row| row.name == name) else {
            return Err(Fault::Argument(format!("{name:?} is no elementwise operation")));
        };
        let (tensors, scalars) = operands.split_at(row.arity.min(operands.len()));
        Ok(match derivative {
            None => row.formula(tensors, scalars)?,
            Some(of) => {
                let unknown = || Fault::Argument(format!("{word:?}: {of:?} is no number of an operand"));
                row.derivative_formula(of.parse().map_err(|_| unknown())?, tensors, scalars)?
            }
        })
    }

    fn formulas(mut self, program: &str) -> Result<Vec<Expr>, Fault> {
        for line in program.split(['\n', ';']) {
            let mut words = line.split_whitespace();
            let Some(name) = words.next() else { continue };
            let operands = words.map(|word| self.operand(word)).collect::<Result<Vec<_>, Fault>>()?;
            if name == "return" {
                return Ok(operands);
            }
            let value = self.operation(name, &operands)?;
            self.values.push(value);
        }
        Err(Fault::Argument("a formula ends with a line that returns its results".into()))
    }
}

/// Makes a formula of `input_count` tensors and `scalar_count` numbers from a program: one operation per line (or separated by `;`),
/// and at the end `return` with the results. A line is the name of an elementwise operation (`claystone_formula_operations` lists them)
/// and its operands: first its tensors, then its scalar arguments. An operand is an input (`x0`), a scalar (`s0`), the result of an
/// earlier line (`v0` for the first), or a number. A name with an apostrophe and an index, such as `gelu'0`, is the derivative with
/// respect to that operand. The formula `mul x0 s0; relu v0; return v1` computes `relu(x0 * s0)`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn claystone_formula_new(
    program: *const c_char,
    input_count: usize,
    scalar_count: usize,
    formula: *mut *mut ClaystoneFormula,
) -> ClaystoneStatus {
    guard("claystone_formula_new", || {
        // SAFETY: the caller promises a string and a valid result pointer.
        let (program, formula) = unsafe { (text(program, "program")?, output(formula, "formula")?) };
        let exprs = Parser { inputs: input_count, scalars: scalar_count, values: Vec::new() }.formulas(program)?;
        let made = PreparedMap::new("formula", input_count, scalar_count, |_, _| exprs)?;
        formula.write(handle(ClaystoneFormula(made)));
        Ok(())
    })
}

/// Computes a formula in one launch. Inputs may have any strides and broadcast to the shape of the outputs, which all have one shape
/// and different storages; an output may also be an input. Each result is converted to the dtype of its output. The formula computes
/// in the widest type of its inputs, or in that of the outputs if all inputs are integers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn claystone_formula_run(
    formula: *const ClaystoneFormula,
    inputs: ClaystoneTensors,
    scalars: *const f64,
    scalar_count: usize,
    outputs: ClaystoneTensors,
) -> ClaystoneStatus {
    guard("claystone_formula_run", || {
        // SAFETY: the caller promises live handles and arrays of the given lengths.
        let (formula, inputs, scalars, outputs) = unsafe {
            let numbers = array(scalars, scalar_count, "scalars")?;
            (
                borrow(formula, "formula")?,
                borrow_tensors(&inputs, "an input")?,
                numbers,
                borrow_tensors(&outputs, "an output")?,
            )
        };
        let scalars: Vec<Scalar> = scalars.iter().map(|&x| Scalar::Float(x)).collect();
        Ok(no_grad(|| formula.0.launch(&inputs, &scalars, &outputs))?)
    })
}

/// Releases a formula; null is ignored.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn claystone_formula_release(formula: *mut ClaystoneFormula) {
    // SAFETY: the caller promises a handle that is not used afterwards.
    unsafe { release("claystone_formula_release", formula) };
}

/// The operations of formulas, one per line: the name, the number of tensors, the number of scalar arguments, and the accepted dtypes
/// (`any`, `float` or `integer`). The caller owns the string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn claystone_formula_operations(operations: *mut ClaystoneBytes) -> ClaystoneStatus {
    guard("claystone_formula_operations", || {
        // SAFETY: the caller promises a pointer that is valid for writing.
        let destination = unsafe { output(operations, "operations")? };
        let mut list = String::new();
        for row in ROWS {
            let dtypes = match row.accepts {
                Accepts::Float => "float",
                Accepts::Integer => "integer",
                _ => "any",
            };
            _ = writeln!(list, "{} {} {} {dtypes}", row.name, row.arity, row.scalars.len());
        }
        destination.write(ClaystoneBytes::new(list.into_bytes()));
        Ok(())
    })
}

/// Stores the number of launches of this process so far: kernels on OpenCL devices, and operations on the CPU device. Copies, fills,
/// reads and writes are not counted.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn claystone_launch_count(count: *mut u64) -> ClaystoneStatus {
    guard("claystone_launch_count", || {
        // SAFETY: the caller promises a pointer that is valid for writing.
        unsafe { output(count, "count")? }.write(total_launches());
        Ok(())
    })
}
