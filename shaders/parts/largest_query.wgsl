// The largest magnitude of a row of queries.
fn largest_query(item: Item, kv_head: u32, head_tile: u32, row: u32) -> f32 {
    var largest = 0.0;
    for (var quad = 0u; quad < K_QUADS; quad++) {
        let a = abs(row_quad(item, kv_head, head_tile, row, quad));
        largest = max(largest, max(max(a.x, a.y), max(a.z, a.w)));
    }
    return largest;
}
