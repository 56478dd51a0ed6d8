//! Products with a matrix of few rows on GPUs: as fast as the other matrix is read.

use crate::backend::problem::gemm::GemmPlan;

/// What comes after the template of the other kernels.
pub(crate) const TEMPLATE: &str = include_str!("../../../kernels/gemm_thin.cl");

/// Most rows.
const ROWS: usize = 4;
/// Work-items of a group, at least and at most.
const MIN_THREADS: usize = 256;
const MAX_THREADS: usize = 1024;
/// Neighbours that read at once.
const WARP: usize = 32;
/// Elements of a column that a work-item is worth.
const EACH: usize = 8;
/// Work-items that occupy a compute unit.
const BUSY: usize = 2048;

/// A kernel of the template; see there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Thin {
    rows: usize,
    /// Along k, for each of the columns.
    lanes: usize,
    columns: usize,
    /// Whether neighbours along k are neighbours in the right matrix.
    along_k: bool,
}

impl Thin {
    /// Bytes of local memory that a work-item takes at most.
    pub(crate) const LOCAL_EACH: usize = ROWS * size_of::<f64>();

    /// The kernel for this problem on a device of so many compute units, and of so many work-items a group at most; none where
    /// the left matrix has too many rows.
    pub(crate) fn choose(plan: &GemmPlan, units: usize, most: usize) -> Option<Thin> {
        if plan.m > ROWS {
            return None;
        }
        let (columns, most) = (plan.n * plan.count(), most.min(MAX_THREADS));
        let along_k = plan.b.row.abs() == 1 && plan.b.col.abs() != 1;
        // A warp along the contiguous direction; then so many that the device has enough of them.
        let (mut lanes, most) = if along_k { (plan.k.next_power_of_two().min(WARP), most) } else { (1, most / WARP) };
        while 2 * lanes <= most && 2 * lanes * EACH <= plan.k && lanes * columns < units * BUSY {
            lanes *= 2;
        }
        let columns = (MIN_THREADS / lanes).max(if along_k { 1 } else { WARP });
        Some(Thin { rows: plan.m, lanes, columns, along_k })
    }

    /// Rows and columns of the result that a work-group computes.
    pub(crate) fn tile(self) -> (usize, usize) {
        (self.rows, self.columns)
    }

    pub(crate) fn threads(self) -> usize {
        self.lanes * self.columns
    }

    /// One number that tells it from every other.
    pub(crate) fn key(self) -> usize {
        (self.rows << 24) | (self.lanes << 12) | (self.columns << 1) | self.along_k as usize
    }

    pub(crate) fn defines(self) -> String {
        let Thin { rows, lanes, columns, along_k } = self;
        format!(
            "#define MR {rows}\n#define LANES {lanes}\n#define WIDTH {columns}\n#define B_ALONG_K {}\n",
            along_k as u8
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Shape;
    use crate::tensor::Layout;

    /// As many work-items as occupy the device, where the columns are long enough.
    #[test]
    fn the_work_is_shared_out() {
        let chosen = |[m, n, k]: [usize; 3], transposed: bool| {
            let (a, out) = (Layout::contiguous([m, k].into()), Layout::contiguous([m, n].into()));
            let b = Layout::contiguous(Shape::from(if transposed { [n, k] } else { [k, n] }));
            let b = if transposed { b.transpose(0, 1) } else { b };
            Thin::choose(&GemmPlan::new(&a, &b, &out.shape, &[&out]), 132, 1024)
        };
        for sizes in [[1, 1, 1], [1, 10, 1 << 20], [4, 4096, 4096], [2, 1 << 20, 9], [3, 7, 0]] {
            for transposed in [false, true] {
                let thin = chosen(sizes, transposed).unwrap();
                assert!(
                    (MIN_THREADS..=MAX_THREADS).contains(&thin.threads()) && thin.threads().is_power_of_two(),
                    "{thin:?}"
                );
                assert!(thin.threads() % 32 == 0 && thin.rows == sizes[0], "{thin:?}");
            }
        }
        let lanes = |sizes, transposed| chosen(sizes, transposed).unwrap().lanes;
        assert_eq!([lanes([1, 4096, 8192], false), lanes([1, 1 << 20, 9], false)], [32, 1]);
        assert_eq!([lanes([1, 16_384, 4096], true), lanes([1, 10, 1 << 20], true)], [32, 1024]);
        assert_eq!(chosen([5, 64, 64], false), None);
    }
}
