//! One file per subcommand: its flags and what it does.

pub mod evaluate;
pub mod inspect;
pub mod plan;
pub mod record;
pub mod run;
pub mod train;
