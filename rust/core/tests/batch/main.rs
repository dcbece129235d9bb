//! Laws of a batch as bytes: what is written is read; what is read keeps every bound, whatever the bytes.

mod skeleton;
mod table_cases;
mod table_fuzz;
mod table_model;
mod table_props;
