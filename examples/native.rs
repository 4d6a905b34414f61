//! libsamebits from Rust: rustc examples/native.rs -L DIR -l samebits, where DIR has libsamebits.so.
//!
//! native ARCHIVE loads an archive's kernels on the first GPU, and says which bits they give.

use std::ffi::{c_char, c_int, c_void, CStr, CString};
use std::ptr::null_mut;

extern "C" {
    fn sb_archive_open(path: *const c_char, archive: *mut *mut c_void) -> c_int;
    fn sb_archive_close(archive: *mut c_void);
    fn sb_context_create(archive: *const c_void, device: c_int, context: *mut *mut c_void) -> c_int;
    fn sb_context_destroy(context: *mut c_void);
    fn sb_gemm(context: *const c_void, product: *const Product, stream: *mut c_void) -> c_int;
    fn sb_contract_digest(archive: *const c_void, dtype: c_int) -> *const c_char;
    fn sb_last_error() -> *const c_char;
}

/// Distances in elements, from a row, a column and a matrix to the next.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Matrix {
    pub data: *mut c_void,
    pub row: i64,
    pub column: i64,
    pub batch: i64,
}

/// out[m, n] = a[m, k] b[k, n] + bias[n]. Dtypes: 0 is f32, 1 bf16, 2 f16.
#[repr(C)]
pub struct Product {
    pub dtype: c_int,
    pub out_dtype: c_int,
    pub m: i64,
    pub n: i64,
    pub k: i64,
    pub batch: i64,
    pub a: Matrix,
    pub b: Matrix,
    pub out: Matrix,
    pub bias: *const c_void,
    pub accumulate: c_int,
}

/// The library's sentence about a failure.
fn checked(status: c_int) -> Result<(), String> {
    match status {
        0 => Ok(()),
        _ => Err(unsafe { CStr::from_ptr(sb_last_error()) }.to_string_lossy().into_owned()),
    }
}

pub struct Engine(*mut c_void, *mut c_void);

impl Engine {
    pub fn new(path: &str, device: i32) -> Result<Engine, String> {
        let (path, mut engine) = (CString::new(path).map_err(|e| e.to_string())?, Engine(null_mut(), null_mut()));
        checked(unsafe { sb_archive_open(path.as_ptr(), &mut engine.0) })?;
        checked(unsafe { sb_context_create(engine.0, device, &mut engine.1) })?;
        Ok(engine)
    }

    /// # Safety
    /// The addresses are of memory on the GPU that holds the matrices until the stream has run the product.
    pub unsafe fn gemm(&self, product: &Product, stream: *mut c_void) -> Result<(), String> {
        checked(sb_gemm(self.1, product, stream))
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        unsafe {
            sb_context_destroy(self.1);
            sb_archive_close(self.0);
        }
    }
}

fn main() -> Result<(), String> {
    let path = std::env::args().nth(1).ok_or("native ARCHIVE")?;
    let engine = Engine::new(&path, 0)?;
    let digest = unsafe { sb_contract_digest(engine.0, 0) };
    println!("f32: {}", unsafe { CStr::from_ptr(digest) }.to_string_lossy());
    let none = Matrix { data: null_mut(), row: 1, column: 1, batch: 0 };
    let empty = Product {
        dtype: 0, out_dtype: 0, m: 0, n: 0, k: 0, batch: 1, a: none, b: none, out: none, bias: null_mut(), accumulate: 0,
    };
    unsafe { engine.gemm(&empty, null_mut()) } // a product without elements
}
