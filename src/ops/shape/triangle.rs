//! Triangles and diagonals of matrices.

use std::borrow::Borrow;
use std::ops::Range;

use crate::ops::dispatch::prelude::*;

operations! {
    /// Keeps the elements on and below a diagonal of each matrix (the last two dims), and sets all others to 0 (PyTorch's `tril`). Diagonal
    /// 0 is the main diagonal, and positive numbers are above it. Differentiable. Fails for fewer than two dims.
    ///
    /// ```
    /// use claystone::{Device, Tensor};
    /// let a = Tensor::ones([2, 3], Device::Cpu)?;
    /// assert_eq!(a.tril(0)?.to_vec::<f32>()?, [1.0, 0.0, 0.0, 1.0, 1.0, 0.0]);
    /// assert_eq!(a.triu(1)?.to_vec::<f32>()?, [0.0, 1.0, 1.0, 0.0, 0.0, 1.0]);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    tril / tril_ (input: x, diagonal: int = 0): Indexing, All -> Same, differentiable = |op, self, diagonal| {
        self.zero_band(op, diagonal.saturating_add(1), isize::MAX)
    };
    /// Keeps the elements on and above a diagonal of each matrix, and sets all other elements to 0 (PyTorch's `triu`). See
    /// [`Tensor::tril`]. Fails for fewer than two dims.
    triu / triu_ (input: x, diagonal: int = 0): Indexing, All -> Same, differentiable = |op, self, diagonal| {
        self.zero_band(op, isize::MIN, diagonal)
    };
}

impl Tensor {
    /// The in-place form of [`Tensor::tril`].
    pub fn tril_(&self, diagonal: isize) -> Result<&Tensor> {
        self.masked_fill_(&self.band_mask("tril_", diagonal.saturating_add(1), isize::MAX)?, 0)
    }

    /// The in-place form of [`Tensor::triu`].
    pub fn triu_(&self, diagonal: isize) -> Result<&Tensor> {
        self.masked_fill_(&self.band_mask("triu_", isize::MIN, diagonal)?, 0)
    }

    /// Returns a copy with zeros where the column index minus the row index is in `from..to`. Recorded for autograd.
    fn zero_band(&self, op: &'static str, from: isize, to: isize) -> Result<Tensor> {
        let plain = self.rank() < 2 || self.numel() == 0;
        let made = if plain { None } else { backend::of_device(self.device()).tril_triu(self, from, to)? };
        let Some(out) = made else { return self.masked_fill(&self.band_mask(op, from, to)?, 0) };
        Ok(autograd::record_unary_differentiable(op, out, self, move |grad| grad.zero_band(op, from, to)))
    }

    /// Returns a mask of the last two dims that is true where the column index minus the row index is in `from..to`. The mask is constant
    /// along diagonals, so it is a view of one vector in which each row starts one element earlier.
    fn band_mask(&self, op: &'static str, from: isize, to: isize) -> Result<Tensor> {
        let [.., rows, columns] = *self.shape().dims() else {
            fail!(op, "a tensor of shape {} has no matrices: it needs at least two dimensions", self.shape());
        };
        let options = (DType::Bool, self.device());
        if self.numel() == 0 {
            return Tensor::zeros([rows, columns], options);
        }
        // Element i of the vector is the value of the diagonal whose column index minus row index is i - (rows - 1).
        let diagonals = Tensor::zeros(rows + columns - 1, options)?;
        let position = |d: isize| d.saturating_add_unsigned(rows - 1).clamp(0, diagonals.numel() as isize) as usize;
        let (from, to) = (position(from), position(to));
        if from < to {
            diagonals.narrow(0, from, to - from)?.fill_(true)?;
        }
        let layout = Layout { shape: [rows, columns].into(), strides: [-1, 1].into_iter().collect(), offset: rows - 1 };
        Ok(diagonals.with_layout(layout))
    }

    /// Returns the row and column indices of the elements that [`Tensor::tril`] keeps in a matrix of this size, in row-major order, as a
    /// `[2, n]` tensor of i64 (PyTorch's `tril_indices`).
    #[track_caller]
    pub fn tril_indices(rows: usize, columns: usize, offset: isize, device: Device) -> Result<Tensor> {
        let _caller = Caller::enter();
        let op = "tril_indices";
        Shape::from([rows, columns]).checked(op)?;
        // The first row that has an element in the triangle.
        let first = if columns == 0 { rows } else { offset.min(0).unsigned_abs().min(rows) };
        let kept =
            |row: usize| 0..offset.saturating_add_unsigned(row).saturating_add(1).clamp(0, columns as isize) as usize;
        triangle_indices(op, first..rows, kept, device)
    }

    /// Returns the row and column indices of the elements that [`Tensor::triu`] keeps (PyTorch's `triu_indices`). See
    /// [`Tensor::tril_indices`].
    #[track_caller]
    pub fn triu_indices(rows: usize, columns: usize, offset: isize, device: Device) -> Result<Tensor> {
        let _caller = Caller::enter();
        let op = "triu_indices";
        Shape::from([rows, columns]).checked(op)?;
        // The end of the rows that have an element in the triangle.
        let end = (columns as isize).saturating_sub(offset).max(0) as usize;
        let kept = |row: usize| offset.saturating_add_unsigned(row).clamp(0, columns as isize) as usize..columns;
        triangle_indices(op, 0..if columns == 0 { 0 } else { end.min(rows) }, kept, device)
    }

    /// Returns a square matrix with a vector on a diagonal and zeros elsewhere, or a diagonal of a matrix as a vector, which is a view
    /// (PyTorch's `diag`). Differentiable. Fails for a number of dims other than one or two.
    ///
    /// ```
    /// use claystone::{Device, Tensor};
    /// let v = Tensor::arange(1, 3, 1, Device::Cpu)?;
    /// assert_eq!(v.diag(0)?.to_vec::<f32>()?, [1.0, 0.0, 0.0, 2.0]);
    /// assert_eq!(v.diag(0)?.diag(0)?.to_vec::<f32>()?, [1.0, 2.0]);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    #[track_caller]
    pub fn diag(&self, diagonal: isize) -> Result<Tensor> {
        match self.rank() {
            1 => self.diag_embed(diagonal, 0, 1).with_op("diag"),
            2 => self.diagonal(diagonal, 0, 1).with_op("diag"),
            rank => fail!("diag", "a tensor of rank {rank} is neither a vector nor a matrix"),
        }
    }

    /// Returns square matrices with the last dim on a diagonal and zeros elsewhere. The matrices are dims `dim1` and `dim2` of the result
    /// (PyTorch's `diag_embed`, with defaults of 0, -2 and -1). Differentiable. Fails for a scalar, and if `dim1` and `dim2` are the same
    /// dim.
    #[track_caller]
    pub fn diag_embed(&self, offset: isize, dim1: isize, dim2: isize) -> Result<Tensor> {
        return_replacement!(op = "diag_embed", [self], offset, dim1, dim2);
        let [outer @ .., len] = self.shape().dims() else {
            return Err(Error::invalid(op, "a scalar has no dimension that could be a diagonal"));
        };
        let side = len.saturating_add(offset.unsigned_abs());
        let flat: Shape = outer.iter().copied().chain([side, side]).collect();
        let (a, b) = (flat.dim(op, dim1)?, flat.dim(op, dim2)?);
        invalid!(op if a == b, "a diagonal needs two dimensions, and {dim1} and {dim2} are the same");
        let mut shape: Dims = outer.iter().copied().collect();
        [a.min(b), a.max(b)].into_iter().for_each(|d| shape.insert(d, side));
        self.scatter_into_zeros(op, &shape.into_iter().collect(), move |l| Ok(l.diagonal(offset, a, b)))
    }

    /// Returns the coordinates of a grid as one tensor per vector: vector i varies along dim i, and is repeated along all other dims
    /// (PyTorch's `meshgrid` with `indexing='ij'`). The results are views. Differentiable. Fails for an empty list, and for a tensor of
    /// two or more dims.
    ///
    /// ```
    /// use claystone::{Device, Tensor};
    /// let (x, y) = (Tensor::arange(0, 2, 1, Device::Cpu)?, Tensor::arange(0, 3, 1, Device::Cpu)?);
    /// let grid = Tensor::meshgrid(&[&x, &y])?;
    /// assert_eq!(grid[0].to_vec::<f32>()?, [0.0, 0.0, 0.0, 1.0, 1.0, 1.0]);
    /// assert_eq!(grid[1].to_vec::<f32>()?, [0.0, 1.0, 2.0, 0.0, 1.0, 2.0]);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    #[track_caller]
    pub fn meshgrid<T: Borrow<Tensor>>(tensors: &[T]) -> Result<Vec<Tensor>> {
        Tensor::meshgrid_as("meshgrid", tensors)
    }

    /// Returns the coordinates of a grid like [`Tensor::meshgrid`], with the first two dims swapped: the first vector varies along dim 1,
    /// and the second along dim 0 (PyTorch's `meshgrid` with `indexing='xy'`, NumPy's default).
    ///
    /// ```
    /// use claystone::{Device, Tensor};
    /// let (x, y) = (Tensor::arange(0, 2, 1, Device::Cpu)?, Tensor::arange(0, 3, 1, Device::Cpu)?);
    /// let grid = Tensor::meshgrid_xy(&[&x, &y])?;
    /// assert_eq!(grid[0].to_vec::<f32>()?, [0.0, 1.0, 0.0, 1.0, 0.0, 1.0]);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    #[track_caller]
    pub fn meshgrid_xy<T: Borrow<Tensor>>(tensors: &[T]) -> Result<Vec<Tensor>> {
        let grid = Tensor::meshgrid_as("meshgrid_xy", tensors)?;
        if grid.len() < 2 { Ok(grid) } else { grid.iter().map(|t| t.transpose(0, 1)).collect() }
    }

    fn meshgrid_as<T: Borrow<Tensor>>(op: &'static str, tensors: &[T]) -> Result<Vec<Tensor>> {
        invalid!(op if let Some(t) = tensors.iter().map(Borrow::borrow).find(|t| t.rank() > 1),
            "it takes vectors, and one has shape {}", t.shape());
        invalid!(op if tensors.is_empty(), "there is no tensor");
        let shape: Shape = tensors.iter().map(|t| t.borrow().numel()).collect();
        let along = |(d, t): (usize, &T)| {
            let vector = t.borrow();
            let sizes: Shape = (0..tensors.len()).map(|i| if i == d { vector.numel() } else { 1 }).collect();
            vector.reshape(sizes)?.expand(&shape)
        };
        tensors.iter().enumerate().map(along).collect()
    }
}

/// Returns the row and column indices of a triangle. `kept` returns the range of columns in each row, at least one column.
fn triangle_indices(
    op: &'static str,
    rows: Range<usize>,
    kept: impl Fn(usize) -> Range<usize>,
    device: Device,
) -> Result<Tensor> {
    let mut numbers: Vec<i64> = Vec::new();
    let too_many = |_| Error::invalid(op, "the indices do not fit in memory");
    // Memory is reserved before counting, because counting takes time proportional to the number of rows.
    numbers.try_reserve(rows.len().saturating_mul(2)).map_err(too_many)?;
    let count = rows.clone().map(|row| kept(row).len()).fold(0usize, usize::saturating_add);
    let out = Tensor::empty_with_shape([2, count], DType::I64, device)?; // fails if there are too many indices
    numbers.try_reserve_exact(count.saturating_mul(2)).map_err(too_many)?;
    let elements = || rows.clone().flat_map(|row| kept(row).map(move |column| (row, column)));
    numbers.extend(elements().map(|(row, _)| row as i64).chain(elements().map(|(_, c)| c as i64)));
    out.storage.write(0, bytemuck::cast_slice(&numbers))?;
    Ok(out)
}
