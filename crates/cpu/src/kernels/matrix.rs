//! Strided matrices in memory: a pointer, a shape and the distance between rows and columns.
//!
//! A transpose, a range of columns or one head of an interleaved tensor is the same data seen with
//! other strides. Threads write disjoint blocks of one buffer, whose rows interleave in memory, so
//! a writable matrix cannot be a slice; [`MatMut`] borrows just the elements it addresses.

use std::marker::PhantomData;
use std::ops::Range;

use crate::element::CpuElement;

/// A matrix behind a pointer `P`, which borrows its elements as a `B` would.
#[derive(Debug)]
pub struct Strided<P, B> {
    ptr: P,
    shape: [usize; 2],
    strides: [isize; 2],
    borrow: PhantomData<B>,
}

/// A matrix that is read.
pub type Mat<'a, T> = Strided<*const T, &'a T>;

/// A matrix that is written; no other matrix or slice in use addresses its elements.
pub type MatMut<'a, T> = Strided<*mut T, &'a mut T>;

impl<T> Clone for Mat<'_, T> {
    #[inline]
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Mat<'_, T> {}

// SAFETY: a `Mat` is a shared borrow of elements, a `MatMut` a unique one; both may move to another
// thread under the conditions under which `&T` and `&mut T` may.
unsafe impl<T: Sync> Send for Mat<'_, T> {}
// SAFETY: as above.
unsafe impl<T: Sync> Sync for Mat<'_, T> {}
// SAFETY: as above.
unsafe impl<T: Send> Send for MatMut<'_, T> {}

/// A raw pointer to elements.
trait Pointer {
    /// The address this many elements further.
    fn moved(self, elements: isize) -> Self;
}

impl<T> Pointer for *const T {
    #[inline(always)]
    fn moved(self, elements: isize) -> Self {
        self.wrapping_offset(elements)
    }
}

impl<T> Pointer for *mut T {
    #[inline(always)]
    fn moved(self, elements: isize) -> Self {
        self.wrapping_offset(elements)
    }
}

#[allow(private_bounds, reason = "there are two kinds of pointers")]
impl<P: Pointer, B> Strided<P, B> {
    /// The transpose, over the same elements.
    #[inline]
    pub fn t(self) -> Self {
        let ([rows, cols], [down, right]) = (self.shape, self.strides);
        Self { shape: [cols, rows], strides: [right, down], ..self }
    }

    /// A block of rows and columns.
    ///
    /// # Panics
    /// If it is not within the matrix.
    #[inline]
    pub fn block(self, rows: Range<usize>, cols: Range<usize>) -> Self {
        let shape = check_block(self.shape, &rows, &cols);
        let start = self.offset(rows.start, cols.start);
        Self { ptr: self.ptr.moved(start), shape, ..self }
    }

    /// Number of rows and columns.
    #[inline]
    pub fn shape(&self) -> [usize; 2] {
        self.shape
    }

    /// Elements from one row, and from one column, to the next.
    #[inline]
    pub fn strides(&self) -> [isize; 2] {
        self.strides
    }

    /// Elements from (0, 0) to (i, j).
    #[inline(always)]
    fn offset(&self, i: usize, j: usize) -> isize {
        i as isize * self.strides[0] + j as isize * self.strides[1]
    }

    /// Where row `i` starts and how many elements it has, which must be adjacent.
    #[inline(always)]
    fn row_at(&self, i: usize) -> (isize, usize) {
        let [rows, cols] = self.shape;
        assert!(i < rows && (self.strides[1] == 1 || cols <= 1));
        (self.offset(i, 0), cols)
    }
}

impl<'a, T> Mat<'a, T> {
    /// A `rows × cols` matrix whose element `(i, j)` is `data[i * strides[0] + j * strides[1]]`.
    ///
    /// # Panics
    /// If an element lies beyond the end of `data`.
    #[inline]
    pub fn new(data: &'a [T], shape: [usize; 2], strides: [usize; 2]) -> Self {
        check_extent(data.len(), shape, strides);
        // SAFETY: every element lies within `data`, which is borrowed for as long.
        unsafe { Self::from_raw(data.as_ptr(), shape, strides.map(|s| s as isize)) }
    }

    /// A contiguous row-major matrix.
    ///
    /// # Panics
    /// If `data` is too short.
    #[inline]
    pub fn rows_of(data: &'a [T], rows: usize, cols: usize) -> Self {
        Self::new(data, [rows, cols], [cols, 1])
    }

    /// A matrix at an address.
    ///
    /// # Safety
    /// Every element must be readable, and must not be written, for the lifetime `'a`.
    #[inline]
    pub unsafe fn from_raw(ptr: *const T, shape: [usize; 2], strides: [isize; 2]) -> Self {
        Self { ptr, shape, strides, borrow: PhantomData }
    }

    /// Address of element (0, 0).
    #[inline]
    pub fn as_ptr(&self) -> *const T {
        self.ptr
    }

    /// Element (i, j).
    ///
    /// # Panics
    /// If there is no such element.
    #[inline]
    pub fn at(&self, i: usize, j: usize) -> T
    where
        T: Copy,
    {
        assert!(i < self.shape[0] && j < self.shape[1], "({i}, {j}) of {:?}", self.shape);
        // SAFETY: the element is within the shape.
        unsafe { *self.ptr.offset(self.offset(i, j)) }
    }

    /// Row `i` as a slice, if its elements are adjacent.
    ///
    /// # Panics
    /// If there is no such row or its elements are not adjacent.
    #[inline(always)]
    pub fn row(&self, i: usize) -> &'a [T] {
        let (start, cols) = self.row_at(i);
        // SAFETY: row `i` exists, and its `cols` elements are adjacent and borrowed for `'a`.
        unsafe { std::slice::from_raw_parts(self.ptr.offset(start), cols) }
    }
}

impl<'a, T> MatMut<'a, T> {
    /// A `rows × cols` matrix whose element `(i, j)` is `data[i * strides[0] + j * strides[1]]`.
    ///
    /// # Panics
    /// If an element lies beyond the end of `data`.
    #[inline]
    pub fn new(data: &'a mut [T], shape: [usize; 2], strides: [usize; 2]) -> Self {
        check_extent(data.len(), shape, strides);
        // SAFETY: every element lies within `data`, which is borrowed uniquely for as long.
        unsafe { Self::from_raw(data.as_mut_ptr(), shape, strides.map(|s| s as isize)) }
    }

    /// A contiguous row-major matrix.
    ///
    /// # Panics
    /// If `data` is too short.
    #[inline]
    pub fn rows_of(data: &'a mut [T], rows: usize, cols: usize) -> Self {
        Self::new(data, [rows, cols], [cols, 1])
    }

    /// A matrix at an address.
    ///
    /// # Safety
    /// For the lifetime `'a` every element must be readable and writable, and nothing else may use
    /// it.
    #[inline]
    pub unsafe fn from_raw(ptr: *mut T, shape: [usize; 2], strides: [isize; 2]) -> Self {
        Self { ptr, shape, strides, borrow: PhantomData }
    }

    /// The same matrix for a shorter time.
    #[inline]
    pub fn reborrow(&mut self) -> MatMut<'_, T> {
        MatMut { ..*self }
    }

    /// The matrix for reading, while this borrow lasts.
    #[inline]
    pub fn as_ref(&self) -> Mat<'_, T> {
        // SAFETY: the unique borrow of the elements is lent for reading.
        unsafe { Mat::from_raw(self.ptr, self.shape(), self.strides()) }
    }

    /// Address of element (0, 0).
    #[inline]
    pub fn as_mut_ptr(&mut self) -> *mut T {
        self.ptr
    }

    /// Element (i, j).
    ///
    /// # Panics
    /// If there is no such element.
    #[inline]
    pub fn at_mut(&mut self, i: usize, j: usize) -> &mut T {
        assert!(i < self.shape[0] && j < self.shape[1], "({i}, {j}) of {:?}", self.shape);
        // SAFETY: the element is within the shape, and borrowed uniquely.
        unsafe { &mut *self.ptr.offset(self.offset(i, j)) }
    }

    /// Row `i` as a slice.
    ///
    /// # Panics
    /// If there is no such row or its elements are not adjacent.
    #[inline(always)]
    pub fn row(&mut self, i: usize) -> &mut [T] {
        let (start, cols) = self.row_at(i);
        // SAFETY: row `i` exists, and its `cols` elements are adjacent and borrowed uniquely.
        unsafe { std::slice::from_raw_parts_mut(self.ptr.offset(start), cols) }
    }
}

impl<T: CpuElement> Mat<'_, T> {
    /// Copies the elements, converted for computing, to the front of `out`; returns a matrix over
    /// them whose adjacent elements were adjacent here, so that reading is always in order.
    #[inline(always)]
    pub fn load_into<'b>(self, out: &'b mut [T::Acc]) -> Mat<'b, T::Acc> {
        if by_columns(self.strides()) {
            return self.t().load_into(out).t();
        }
        let [rows, cols] = self.shape();
        let out = &mut out[..rows * cols];
        for (i, line) in out.chunks_exact_mut(cols.max(1)).enumerate() {
            for (j, o) in line.iter_mut().enumerate() {
                // SAFETY: (i, j) is within the shape, so the element may be read.
                *o = unsafe { (*self.ptr.offset(self.offset(i, j))).load() };
            }
        }
        Mat::rows_of(out, rows, cols)
    }
}

impl<C: CpuElement> MatMut<'_, C> {
    /// Stores `values`, or adds them to what is there.
    #[inline(always)]
    pub fn store_from(self, values: Mat<'_, C::Acc>, accumulate: bool) {
        assert_eq!(self.shape(), values.shape());
        if by_columns(self.strides()) {
            return self.t().store_from(values.t(), accumulate);
        }
        let [rows, cols] = self.shape();
        for i in 0..rows {
            for j in 0..cols {
                // SAFETY: (i, j) is within both shapes; the elements here are borrowed uniquely.
                unsafe {
                    let value = *values.ptr.offset(values.offset(i, j));
                    let place = self.ptr.offset(self.offset(i, j));
                    *place = C::store(if accumulate { (*place).load() + value } else { value });
                }
            }
        }
    }
}

/// Whether the elements of a column, and not those of a row, are adjacent.
#[inline(always)]
pub(super) fn by_columns(strides: [isize; 2]) -> bool {
    strides[0] == 1 && strides[1] != 1
}

fn check_extent(len: usize, [rows, cols]: [usize; 2], strides: [usize; 2]) {
    if rows > 0 && cols > 0 {
        let last = (rows - 1) * strides[0] + (cols - 1) * strides[1];
        assert!(
            last < len,
            "a {rows}×{cols} matrix with strides {strides:?} needs {} elements, not {len}",
            last + 1
        );
    }
}

fn check_block(shape: [usize; 2], rows: &Range<usize>, cols: &Range<usize>) -> [usize; 2] {
    assert!(rows.start <= rows.end && rows.end <= shape[0], "rows {rows:?} of {shape:?}");
    assert!(cols.start <= cols.end && cols.end <= shape[1], "columns {cols:?} of {shape:?}");
    [rows.len(), cols.len()]
}
