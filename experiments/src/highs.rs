//! HiGHS behind a safe interface: a model of columns and rows, and a solver that answers with a proven bound.
//!
//! The library is loaded when it is first wanted, so that nothing needs it but what solves programs. This module knows
//! nothing of traces or plans.

mod sys;

use std::ffi::{CStr, c_char, c_int, c_void};
use std::path::{Path, PathBuf};
use std::ptr::{null, null_mut};
use std::time::Duration;

use thiserror::Error;

/// The environment variable that names another `libhighs.so`.
pub const HIGHS_VARIABLE: &str = "PLIMSOLL_HIGHS";
/// Where `make tools` puts the library, from the root of the repository.
const FETCHED: &str = ".tools/highs/highsbox/highs_dist/lib/libhighs.so";

/// Why a program could not be solved.
#[derive(Debug, Error)]
pub enum HighsError {
    /// There is no library.
    #[error("programs are solved by HiGHS: `make tools` fetches it, or {HIGHS_VARIABLE} names a libhighs.so of 1.15")]
    Missing,
    /// There is one, and it cannot be loaded.
    #[error("{} is no HiGHS that can be loaded", .path.display())]
    NotLoaded {
        /// The library.
        path: PathBuf,
        /// What the loader says.
        source: libloading::Error,
    },
    /// It has another version, so its interface may differ.
    #[error("{} is HiGHS {}.{}; 1.15 is needed", .path.display(), .found.0, .found.1)]
    Version {
        /// The library.
        path: PathBuf,
        /// Its major and minor version.
        found: (c_int, c_int),
    },
    /// HiGHS refused a call.
    #[error("HiGHS failed in {0}")]
    Failed(&'static str),
}

/// The loaded library.
pub struct Highs {
    functions: sys::Functions,
}

impl Highs {
    /// Loads HiGHS: the one that the environment names, or the one that `make tools` fetched.
    pub fn find() -> Result<Self, HighsError> {
        let path = match std::env::var_os(HIGHS_VARIABLE) {
            Some(path) => PathBuf::from(path),
            None => fetched().ok_or(HighsError::Missing)?,
        };
        Self::load(&path)
    }

    fn load(path: &Path) -> Result<Self, HighsError> {
        // SAFETY: a library that the user or `make tools` put there as HiGHS. That it has every function is checked
        // here, that their types are those of 1.15 by its version, which is read through a function of no arguments.
        let functions = unsafe { sys::Functions::load(path) };
        let functions = functions.map_err(|source| HighsError::NotLoaded { path: path.to_owned(), source })?;
        // SAFETY: takes no arguments and reads a constant.
        let found = unsafe { ((functions.Highs_versionMajor)(), (functions.Highs_versionMinor)()) };
        if found != (1, 15) {
            return Err(HighsError::Version { path: path.to_owned(), found });
        }
        Ok(Highs { functions })
    }
}

/// The fetched library, looked for from the working directory and from the executable upwards.
fn fetched() -> Option<PathBuf> {
    let executable = std::env::current_exe().ok();
    let directories = [std::env::current_dir().ok(), executable];
    let above = directories.iter().flatten().flat_map(|directory| directory.ancestors());
    above.map(|directory| directory.join(FETCHED)).find(|path| path.exists())
}

/// A column's index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Column(c_int);

impl Column {
    /// As an index into a solution.
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

/// A mixed-integer program to be minimised.
#[derive(Clone, Debug, Default)]
pub struct Model {
    cost: Vec<f64>,
    lower: Vec<f64>,
    upper: Vec<f64>,
    integrality: Vec<c_int>,
    row_lower: Vec<f64>,
    row_upper: Vec<f64>,
    row_start: Vec<c_int>,
    index: Vec<c_int>,
    value: Vec<f64>,
}

impl Model {
    /// Adds a column that is 0 or 1.
    pub fn binary(&mut self, cost: f64) -> Column {
        self.column(cost, 1.0, sys::TYPE_INTEGER)
    }

    /// Adds a column that lies between 0 and 1.
    pub fn share(&mut self, cost: f64) -> Column {
        self.column(cost, 1.0, sys::TYPE_CONTINUOUS)
    }

    /// Adds a column that is not negative.
    pub fn continuous(&mut self, cost: f64) -> Column {
        self.column(cost, f64::INFINITY, sys::TYPE_CONTINUOUS)
    }

    fn column(&mut self, cost: f64, upper: f64, kind: c_int) -> Column {
        self.cost.push(cost);
        self.lower.push(0.0);
        self.upper.push(upper);
        self.integrality.push(kind);
        Column(self.cost.len() as c_int - 1)
    }

    /// Demands that the sum of `terms` is at least `least`. A column may stand in several terms.
    pub fn at_least(&mut self, least: f64, terms: impl IntoIterator<Item = (Column, f64)>) {
        let mut terms: Vec<(Column, f64)> = terms.into_iter().collect();
        terms.sort_by_key(|(column, _)| column.0);
        self.row_start.push(self.index.len() as c_int);
        self.row_lower.push(least);
        self.row_upper.push(f64::INFINITY);
        for same in terms.chunk_by(|one, other| one.0 == other.0) {
            self.index.push(same[0].0.0);
            self.value.push(same.iter().map(|(_, factor)| factor).sum());
        }
    }

    /// Columns.
    pub fn columns(&self) -> usize {
        self.cost.len()
    }

    /// Rows.
    pub fn rows(&self) -> usize {
        self.row_start.len()
    }
}

/// How a solve ended.
#[derive(Clone, Debug, PartialEq)]
pub enum Answer {
    /// There is no solution.
    Infeasible,
    /// No solution costs less than `bound`; the best one found, where one was.
    Bounded {
        /// A proven lower bound on the objective, to HiGHS's tolerances. Minus infinity where nothing is proven.
        bound: f64,
        /// Values of all columns.
        solution: Option<Vec<f64>>,
        /// Whether the solution is proven optimal.
        finished: bool,
    },
}

/// What is heard of a solve under way; false ends it.
pub type Watch<'a> = &'a (dyn Fn(f64) -> bool + Sync);

/// A program loaded into HiGHS.
pub struct Solver<'h> {
    highs: &'h Highs,
    handle: *mut c_void,
    columns: usize,
    integer: bool,
}

impl<'h> Solver<'h> {
    /// Loads `model`, or, unless `integer`, its relaxation to a linear program.
    pub fn new(highs: &'h Highs, model: &Model, integer: bool) -> Result<Self, HighsError> {
        // SAFETY: takes no arguments; the handle is destroyed once, when the solver is dropped.
        let handle = unsafe { (highs.functions.Highs_create)() };
        if handle.is_null() {
            return Err(HighsError::Failed("Highs_create"));
        }
        let solver = Solver { highs, handle, columns: model.columns(), integer };
        solver.set_options()?;
        solver.pass(model)?;
        Ok(solver)
    }

    fn set_options(&self) -> Result<(), HighsError> {
        let functions = &self.highs.functions;
        // SAFETY: the handle lives, names and strings end in a zero byte.
        let statuses = unsafe {
            [
                (functions.Highs_setBoolOptionValue)(self.handle, c"output_flag".as_ptr(), 0),
                // Every callback comes on the calling thread, and the same program is solved the same way.
                (functions.Highs_setIntOptionValue)(self.handle, c"threads".as_ptr(), 1),
                (functions.Highs_setStringOptionValue)(self.handle, c"parallel".as_ptr(), c"off".as_ptr()),
                (functions.Highs_setDoubleOptionValue)(self.handle, c"mip_rel_gap".as_ptr(), 1e-7),
            ]
        };
        let failed = statuses.contains(&sys::STATUS_ERROR);
        if failed { Err(HighsError::Failed("setting options")) } else { Ok(()) }
    }

    fn pass(&self, model: &Model) -> Result<(), HighsError> {
        let functions = &self.highs.functions;
        let (columns, rows, entries) = (model.columns() as c_int, model.rows() as c_int, model.index.len() as c_int);
        let (format, sense) = (sys::FORMAT_ROW_WISE, sys::SENSE_MINIMIZE);
        let (cost, lower, upper) = (model.cost.as_ptr(), model.lower.as_ptr(), model.upper.as_ptr());
        let (row_lower, row_upper) = (model.row_lower.as_ptr(), model.row_upper.as_ptr());
        let (start, index, value) = (model.row_start.as_ptr(), model.index.as_ptr(), model.value.as_ptr());
        let relaxed = vec![sys::TYPE_CONTINUOUS; model.columns()];
        let integrality = if self.integer { &model.integrality } else { &relaxed };
        // SAFETY: the handle lives; the arrays have the lengths that are passed (one start per row), and are copied.
        let status = unsafe {
            (functions.Highs_passMip)(
                self.handle,
                columns,
                rows,
                entries,
                format,
                sense,
                0.0,
                cost,
                lower,
                upper,
                row_lower,
                row_upper,
                start,
                index,
                value,
                integrality.as_ptr(),
            )
        };
        if status == sys::STATUS_ERROR { Err(HighsError::Failed("passing the program")) } else { Ok(()) }
    }

    /// Bounds a column anew.
    pub fn bound(&mut self, column: Column, lower: f64, upper: f64) -> Result<(), HighsError> {
        assert!(column.index() < self.columns, "column {} of {}", column.0, self.columns);
        // SAFETY: the handle lives and has that column.
        let status = unsafe { (self.highs.functions.Highs_changeColBounds)(self.handle, column.0, lower, upper) };
        if status == sys::STATUS_ERROR { Err(HighsError::Failed("bounding a column")) } else { Ok(()) }
    }

    /// Solves for at most `limit`, or until `watch`, which hears the bound so far, says no.
    pub fn solve(&mut self, limit: Duration, watch: Watch<'_>) -> Result<Answer, HighsError> {
        let functions = &self.highs.functions;
        let kind = if self.integer { sys::CALLBACK_MIP_INTERRUPT } else { sys::CALLBACK_SIMPLEX_INTERRUPT };
        let mut watched = Watched { watch };
        let data = (&raw mut watched).cast::<c_void>();
        // SAFETY: the handle lives. `watched` outlives the run, and no callback comes after it.
        let status = unsafe {
            (functions.Highs_zeroAllClocks)(self.handle);
            (functions.Highs_setDoubleOptionValue)(self.handle, c"time_limit".as_ptr(), limit.as_secs_f64().max(1e-3));
            (functions.Highs_setCallback)(self.handle, on_callback, data);
            (functions.Highs_startCallback)(self.handle, kind);
            (functions.Highs_run)(self.handle)
        };
        if status == sys::STATUS_ERROR {
            return Err(HighsError::Failed("Highs_run"));
        }
        // SAFETY: the handle lives.
        let model_status = unsafe { (functions.Highs_getModelStatus)(self.handle) };
        Ok(match model_status {
            sys::MODEL_INFEASIBLE => Answer::Infeasible,
            // No column of ours goes to minus infinity at a gain, so this cannot mean unbounded.
            sys::MODEL_UNBOUNDED_OR_INFEASIBLE => Answer::Infeasible,
            _ => {
                let bound = match (self.integer, model_status) {
                    (true, _) => self.number(c"mip_dual_bound"),
                    (false, sys::MODEL_OPTIMAL) => self.number(c"objective_function_value"),
                    // A linear program left half-way proves nothing.
                    (false, _) => f64::NEG_INFINITY,
                };
                Answer::Bounded { bound, solution: self.solution()?, finished: model_status == sys::MODEL_OPTIMAL }
            }
        })
    }

    fn number(&self, name: &'static CStr) -> f64 {
        let mut number = f64::NEG_INFINITY;
        // SAFETY: the handle lives, the name ends in a zero byte, and the result is written to a double.
        let status =
            unsafe { (self.highs.functions.Highs_getDoubleInfoValue)(self.handle, name.as_ptr(), &mut number) };
        if status == sys::STATUS_ERROR || number.is_nan() { f64::NEG_INFINITY } else { number }
    }

    fn solution(&self) -> Result<Option<Vec<f64>>, HighsError> {
        let functions = &self.highs.functions;
        let mut found: c_int = 0;
        // SAFETY: the handle lives, the name ends in a zero byte, and the result is written to an int.
        let status =
            unsafe { (functions.Highs_getIntInfoValue)(self.handle, c"primal_solution_status".as_ptr(), &mut found) };
        if status == sys::STATUS_ERROR || found != sys::SOLUTION_FEASIBLE {
            return Ok(None);
        }
        let mut values = vec![0.0; self.columns];
        // SAFETY: the handle lives, `values` has one place per column, and null skips what is not wanted.
        let status = unsafe {
            (functions.Highs_getSolution)(self.handle, values.as_mut_ptr(), null_mut(), null_mut(), null_mut())
        };
        if status == sys::STATUS_ERROR { Err(HighsError::Failed("Highs_getSolution")) } else { Ok(Some(values)) }
    }
}

impl Drop for Solver<'_> {
    fn drop(&mut self) {
        // SAFETY: the handle lives and is not used again.
        unsafe { (self.highs.functions.Highs_destroy)(self.handle) };
    }
}

struct Watched<'a> {
    watch: Watch<'a>,
}

extern "C" fn on_callback(
    kind: c_int,
    _message: *const c_char,
    out: *const sys::CallbackOut,
    into: *mut sys::CallbackIn,
    data: *mut c_void,
) {
    if out.is_null() || into.is_null() || data == null::<c_void>().cast_mut() {
        return;
    }
    // SAFETY: `data` is what `solve` passed and outlives the run; `out` and `into` are HiGHS's for this call.
    unsafe {
        let watched = &*data.cast::<Watched<'_>>();
        let bound = if kind == sys::CALLBACK_MIP_INTERRUPT { (*out).mip_dual_bound } else { f64::NEG_INFINITY };
        if !(watched.watch)(bound) {
            (*into).user_interrupt = 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Three items of 4, 3 and 2 bytes, of which 5 bytes have to go, at costs of 5, 4 and 3.
    fn knapsack() -> (Model, [Column; 3]) {
        let mut model = Model::default();
        let columns = [5.0, 4.0, 3.0].map(|cost| model.binary(cost));
        model.at_least(5.0, columns.into_iter().zip([4.0, 3.0, 2.0]));
        (model, columns)
    }

    #[test]
    fn a_knapsack_is_solved_and_its_relaxation_bounds_it() {
        let highs = Highs::find().unwrap();
        let (model, columns) = knapsack();
        let solve = |integer| Solver::new(&highs, &model, integer).unwrap().solve(Duration::MAX, &|_| true).unwrap();
        let Answer::Bounded { bound, solution: Some(solution), .. } = solve(true) else { panic!("no solution") };
        assert!((bound - 7.0).abs() < 1e-6, "{bound}");
        let rounded = columns.map(|column| solution[column.index()].round());
        assert_eq!(rounded, [0.0, 1.0, 1.0]);
        let Answer::Bounded { bound, .. } = solve(false) else { panic!("no solution") };
        assert!((bound - (5.0 + 4.0 / 3.0)).abs() < 1e-6, "{bound}");
    }

    #[test]
    fn bounds_hold_until_they_are_changed_again() {
        let highs = Highs::find().unwrap();
        let (model, columns) = knapsack();
        let mut solver = Solver::new(&highs, &model, false).unwrap();
        let mut bound_with = |upper: f64| {
            solver.bound(columns[0], 0.0, upper).unwrap();
            solver.bound(columns[1], 0.0, upper).unwrap();
            solver.solve(Duration::MAX, &|_| true).unwrap()
        };
        assert_eq!(bound_with(0.0), Answer::Infeasible);
        assert!(matches!(bound_with(1.0), Answer::Bounded { bound, .. } if bound < 7.0));
    }

    #[test]
    fn what_is_no_highs_is_refused_by_its_path() {
        let error = Highs::load(Path::new("/nowhere/libhighs.so")).err().unwrap();
        assert!(error.to_string().contains("/nowhere/libhighs.so"), "{error}");
    }
}
