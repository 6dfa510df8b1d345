//! HiGHS's C functions, found in its shared library when the program runs.
//!
//! Names, types and constants are those of `highs_c_api.h` and `HighsCallbackStruct.h` of HiGHS 1.15, built with 32-bit
//! `HighsInt`. Nothing is checked here.

#![allow(non_snake_case)]

use std::ffi::{c_char, c_int, c_void};
use std::path::Path;

use libloading::Library;

pub const STATUS_ERROR: c_int = -1;
pub const FORMAT_ROW_WISE: c_int = 2;
pub const SENSE_MINIMIZE: c_int = 1;
pub const TYPE_CONTINUOUS: c_int = 0;
pub const TYPE_INTEGER: c_int = 1;
pub const MODEL_OPTIMAL: c_int = 7;
pub const MODEL_INFEASIBLE: c_int = 8;
pub const MODEL_UNBOUNDED_OR_INFEASIBLE: c_int = 9;
pub const SOLUTION_FEASIBLE: c_int = 2;
pub const CALLBACK_SIMPLEX_INTERRUPT: c_int = 1;
pub const CALLBACK_MIP_INTERRUPT: c_int = 6;

/// `HighsCallbackDataOut`, as far as it is read: the struct goes on.
#[repr(C)]
pub struct CallbackOut {
    pub cbdata: *mut c_void,
    pub log_type: c_int,
    pub running_time: f64,
    pub simplex_iteration_count: c_int,
    pub ipm_iteration_count: c_int,
    pub pdlp_iteration_count: c_int,
    pub objective_function_value: f64,
    pub mip_node_count: i64,
    pub mip_total_lp_iterations: i64,
    pub mip_primal_bound: f64,
    pub mip_dual_bound: f64,
}

/// `HighsCallbackDataIn`, as far as it is written: the struct goes on.
#[repr(C)]
pub struct CallbackIn {
    pub user_interrupt: c_int,
}

pub type Callback = extern "C" fn(c_int, *const c_char, *const CallbackOut, *mut CallbackIn, *mut c_void);

/// Declares the table of functions and how it is filled in, from one list.
macro_rules! functions {
    ($($name:ident: fn($($argument:ty),*) -> $result:ty;)*) => {
        /// The functions, and the library that they stand in: it stays loaded for as long as they can be called.
        pub struct Functions {
            $(pub $name: unsafe extern "C" fn($($argument),*) -> $result,)*
            _library: Library,
        }

        impl Functions {
            /// Loads the library at `path`.
            ///
            /// # Safety
            ///
            /// The library is HiGHS with the interface that this module describes.
            pub unsafe fn load(path: &Path) -> Result<Self, libloading::Error> {
                // SAFETY: the caller promises that it is HiGHS, whose initialisers only set up its own tables.
                let library = unsafe { Library::new(path) }?;
                Ok(Functions {
                    // SAFETY: the types are those of the C interface that the caller promises.
                    $($name: *unsafe { library.get(concat!(stringify!($name), "\0").as_bytes()) }?,)*
                    _library: library,
                })
            }
        }
    };
}

functions! {
    Highs_versionMajor: fn() -> c_int;
    Highs_versionMinor: fn() -> c_int;
    Highs_create: fn() -> *mut c_void;
    Highs_destroy: fn(*mut c_void) -> ();
    Highs_setBoolOptionValue: fn(*mut c_void, *const c_char, c_int) -> c_int;
    Highs_setIntOptionValue: fn(*mut c_void, *const c_char, c_int) -> c_int;
    Highs_setDoubleOptionValue: fn(*mut c_void, *const c_char, f64) -> c_int;
    Highs_setStringOptionValue: fn(*mut c_void, *const c_char, *const c_char) -> c_int;
    Highs_passMip: fn(
        *mut c_void, c_int, c_int, c_int, c_int, c_int, f64, *const f64, *const f64, *const f64, *const f64, *const f64,
        *const c_int, *const c_int, *const f64, *const c_int
    ) -> c_int;
    Highs_changeColBounds: fn(*mut c_void, c_int, f64, f64) -> c_int;
    Highs_zeroAllClocks: fn(*const c_void) -> c_int;
    Highs_setCallback: fn(*mut c_void, Callback, *mut c_void) -> c_int;
    Highs_startCallback: fn(*mut c_void, c_int) -> c_int;
    Highs_run: fn(*mut c_void) -> c_int;
    Highs_getModelStatus: fn(*const c_void) -> c_int;
    Highs_getIntInfoValue: fn(*const c_void, *const c_char, *mut c_int) -> c_int;
    Highs_getDoubleInfoValue: fn(*const c_void, *const c_char, *mut f64) -> c_int;
    Highs_getSolution: fn(*const c_void, *mut f64, *mut f64, *mut f64, *mut f64) -> c_int;
}
