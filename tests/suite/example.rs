//! The example runs to its end.

#[path = "../../examples/serve.rs"]
mod serve;

#[test]
fn the_example_serves() {
    if crate::common::gpu("the_example_serves").is_none() {
        return;
    }
    serve::main().unwrap();
}
