//! One file per subcommand: its flags and what it does.

pub mod advise;
pub mod behaviour;
pub mod evaluate;
pub mod export;
pub mod finetune;
pub mod gpu_check;
pub mod hold;
pub mod import;
pub mod inspect;
pub mod plan;
pub mod probe;
pub mod record;
pub mod run;
pub mod summarise;
pub mod train;
