//! Manifests: what they say of the kernels, and which are refused.

use super::*;

#[test]
fn manifests_agree_with_the_hosts_structs_and_lists() {
    let mut kernels = BTreeSet::new();
    for choice in choices() {
        let modules = choice.modules().unwrap();
        let export = export(&choice, ExportTarget::Wgsl).unwrap();
        assert_eq!(modules.len(), export.manifest.modules.len());
        for (module, entry) in modules.iter().zip(&export.manifest.modules) {
            kernels.insert(entry.kernel.clone());
            let host = params_of(&entry.kernel);
            let fields: Vec<_> = entry
                .params
                .fields
                .iter()
                .map(|f| (f.name.as_str(), f.offset as usize))
                .collect();
            assert_eq!(fields, host.members, "{}", entry.name);
            assert_eq!(entry.params.size as usize, host.size, "{}", entry.name);
            let bindings: Vec<_> = entry
                .bindings
                .iter()
                .map(|b| (b.binding, b.name.as_str()))
                .collect();
            let listed: Vec<_> = (0..).zip(module.bindings.iter().map(|b| b.name)).collect();
            assert_eq!(bindings, listed, "{}", entry.name);
            for binding in &entry.bindings {
                let said = binding.kind == BindingKind::Uniform || binding.shape.starts_with('[');
                assert!(said && !binding.of.is_empty(), "{}: {binding:?}", entry.name);
            }
            let structs = entry.structs.iter().flat_map(|s| &s.fields);
            for field in entry.params.fields.iter().chain(structs) {
                assert!(
                    !field.what.is_empty(),
                    "{}: nothing says what {} is",
                    entry.name,
                    field.name
                );
            }
            let scales = entry.params.fields.iter().filter(|f| f.of == FieldType::F32);
            assert!(scales.count() <= 2, "{}", entry.name);
            if let Some(variant) = module.variant {
                let bytes = variant.workgroup_bytes(&module.pages[0].1);
                assert_eq!(u64::from(entry.workgroup_bytes), bytes, "{}", entry.name);
                assert_eq!(entry.structs[0].name, "Item");
                assert_eq!(
                    entry.structs[0].size as usize,
                    size_of::<kvpack::work::WorkItem>()
                );
            }
            let needs = module.variant.is_some_and(|v| !v.features().is_empty());
            assert_eq!(entry.portable, !needs, "{}", entry.name);
            assert_eq!(entry.features.is_empty(), !needs, "{}", entry.name);
        }
    }
    let all: BTreeSet<_> = kernel_names().into_iter().map(str::to_owned).collect();
    assert_eq!(kernels, all);
}

#[test]
fn a_manifest_reads_back_as_it_was_written() {
    for target in ExportTarget::ALL {
        let folder = tempfile::tempdir().unwrap();
        let mut choice = choices().remove(0);
        choice.pairs.truncate(1);
        let export = export(&choice, target).unwrap();
        export.write(folder.path()).unwrap();
        let read = Manifest::read(folder.path()).unwrap();
        assert_eq!(read, export.manifest);
        for module in &read.modules {
            let bytes = read.shader(folder.path(), module).unwrap();
            assert!(export.files.contains(&(module.file.clone(), bytes)));
        }
        // A file without the entry point, and one that is not there.
        let module = &read.modules[0];
        fs::write(folder.path().join(&module.file), "fn other() {}").unwrap();
        let refused = read.shader(folder.path(), module).unwrap_err().to_string();
        assert!(
            refused.contains(&module.file) && refused.contains("no entry point"),
            "{refused}"
        );
        fs::remove_file(folder.path().join(&module.file)).unwrap();
        read.shader(folder.path(), module).unwrap_err();
    }
}

/// The formula of each module, against what the crate's own planned kernels dispatch.
#[test]
fn dispatch_formulas_count_what_the_planner_dispatches() {
    let Some(gpu) = common::gpu("dispatch formulas") else {
        return;
    };
    let choice = choice(table(), [2, 6, 64, 32, 64]);
    let (shape, page) = (choice.shape, |side: Side, value| {
        choice.shape.page(side, value).unwrap()
    });
    let by_formula = |module: &Module, field: &str, count: u32| {
        let value = |name: &str| match name {
            _ if name == field => Some(count),
            _ => None,
        };
        module
            .dispatch
            .workgroups(module.kernel, WG_SIZE, value)
            .map_err(|e| e.to_string())
    };
    let counts = [1, 7, 32, 4095, 65_536, 3_000_001, u32::MAX];
    let mut sides: Vec<Side> = table().iter().flat_map(|pair| [pair.k, pair.v]).collect();
    sides.sort_unstable();
    sides.dedup();
    let waiting = page(Side::F16, false);
    for side in sides {
        let page = page(side, false);
        let read = Dequantize::plan(gpu, &page).unwrap();
        let group = side.layout.token_group() > 1;
        let packed = (!group).then(|| Quantize::plan(gpu, &page, &Source::F32).unwrap());
        let grouped = group.then(|| QuantizeGroup::plan(gpu, &page, &waiting).unwrap());
        for runs in counts {
            let said = |groups: kvpack::Result<[u32; 3]>| groups.map_err(|e| e.to_string());
            assert_eq!(
                by_formula(&choice.dequantize(&page), "runs", runs),
                said(read.workgroups(runs)),
                "{side}"
            );
            if let Some(kernel) = &packed {
                assert_eq!(
                    by_formula(&choice.quantize(&page), "runs", runs),
                    said(kernel.workgroups(runs)),
                    "{side}"
                );
            }
            if let Some(kernel) = &grouped {
                let module = choice.quantize_group(&page, &waiting);
                assert_eq!(
                    by_formula(&module, "runs", runs),
                    said(kernel.workgroups(runs)),
                    "{side}"
                );
            }
        }
    }
    // Three query heads of each KV head, in tiles of two: two columns of workgroups.
    let tiled = Choice {
        tweaks: Tweaks {
            head_tile: Some(2),
            ..Tweaks::default()
        },
        ..choice.clone()
    };
    let (k, v) = (page(Side::F16, false), page(Side::F16, true));
    let module = tiled.attention_split(&k, &v, Phase::Decode).unwrap();
    let variant = module.variant.unwrap();
    let split = AttentionSplit::plan(gpu, &k, &v, shape.q_heads, variant, FloatType::F32).unwrap();
    let merge = AttentionMerge::plan(gpu, shape.q_heads, shape.v_head_dim, FloatType::F32).unwrap();
    for count in [1, 12, 65_535, 65_536, 1_000_000] {
        assert_eq!(
            by_formula(&module, "items", count).unwrap(),
            split.workgroups(count).unwrap()
        );
        assert_eq!(split.workgroups(count).unwrap()[2], 4);
        let rows = by_formula(&choice.attention_merge(), "rows", count * shape.q_heads).unwrap();
        assert_eq!(rows, merge.workgroups(count).unwrap());
    }
}

#[test]
fn the_worked_example_of_the_readme_is_right() {
    let text = fs::read_to_string(common::path("shaders/README.md")).unwrap();
    let page = PageLayout::new("int4".parse().unwrap(), 1, 8, 8).unwrap();
    assert_eq!((page.head_words, page.scale_offset, page.words), (1, 8, 12));
    let pack = |rows: [[f32; 8]; 2]| {
        let mut pool = vec![0; page.words as usize];
        let runs = [(3, 0), (4, 1)].map(|(slot, source)| SlotRun {
            page: 0,
            slot,
            count: 1,
            source,
        });
        let source = |run: &SlotRun, _, _, channel: u32| rows[run.source as usize][channel as usize];
        kvpack::reference::quantize(&page, &runs, source, 1.0, &mut pool, &mut Status::default());
        pool
    };
    let mut large = [0.0; 8];
    large[0] = 14.0;
    let k = pack([[7.0, -6.0, 2.0, 3.0, -2.0, 0.4, 0.6, 0.0], large]);
    assert_eq!(
        (k[3], k[4], k[9] >> 16, k[10] & 0xffff),
        (0x010e_32a7, 7, 0x3c00, 0x4000)
    );
    let (mut first, mut second) = ([0.0; 8], [0.0; 8]);
    (first[0], second[1]) = (7.0, 14.0);
    let v = pack([first, second]);
    assert_eq!(
        (v[3], v[4], v[9] >> 16, v[10] & 0xffff),
        (7, 0x70, 0x3c00, 0x4000)
    );
    let scale = 1.0 / 8.0_f64.sqrt();
    let scores = [7.0 * scale, 14.0 * scale];
    let weight = (scores[0] - scores[1]).exp();
    let sum = 1.0 + weight;
    for number in [
        scale,
        scores[0],
        scores[1],
        weight,
        sum,
        7.0 * weight / sum,
        14.0 / sum,
        scores[1] + sum.ln(),
    ] {
        assert!(
            text.contains(&format!("{number:.5}")),
            "shaders/README.md does not say {number:.5}"
        );
    }
    for word in [k[3], k[4], v[4]] {
        assert!(
            text.contains(&format!("{word:#010x}")),
            "shaders/README.md does not say {word:#010x}"
        );
    }
}

/// A small manifest as JSON.
fn small() -> Value {
    let mut choice = choices().remove(0);
    choice.pairs = vec!["int4".parse().unwrap()];
    choice.kernels = vec!["quantize".to_owned(), "attention_merge".to_owned()];
    let export = export(&choice, ExportTarget::Wgsl).unwrap();
    let mut value = serde_json::to_value(&export.manifest).unwrap();
    value["vectors"] = json!([{"case": "c", "folder": "vectors/c", "modules": ["quantize-int4"]}]);
    value
}

#[test]
fn wrong_manifests_are_refused_with_file_and_place() {
    let read = |value: &Value| Manifest::parse("m.json", value.to_string().as_bytes());
    let good = small();
    read(&good).unwrap();
    let changed = |pointer: &str, to: Value| {
        let mut value = good.clone();
        *value.pointer_mut(pointer).unwrap_or_else(|| panic!("{pointer}")) = to;
        value
    };
    for (pointer, to, words) in [
        ("/schema", json!("kvpack.case"), "schema is `kvpack.case`"),
        ("/schema", json!(null), "schema is none"),
        ("/version", json!(2), "version 2"),
        ("/version", json!(-1), "version is not 1"),
        ("/version", json!("1"), "version is not 1"),
        ("/target", json!("cuda"), "unknown variant `cuda`"),
        ("/shape/q_heads", json!(7), "shape: "),
        ("/shape/kv_heads", json!(4294967296_u64), "4294967296"),
        ("/pairs/0", json!("int5"), "pairs[0]: unknown cache format `int5`"),
        ("/modules/0/name", json!("a b"), "modules[0].name"),
        (
            "/modules/0/name",
            json!("attention_merge-f32"),
            "modules: two have the name",
        ),
        ("/modules/0/file", json!("../../etc/passwd"), "modules[0].file"),
        ("/modules/0/file", json!("/etc/passwd"), "modules[0].file"),
        ("/modules/0/file", json!("a\\b"), "modules[0].file"),
        ("/modules/0/file", json!(""), "modules[0].file"),
        ("/modules/0/entry_point", json!(""), "modules[0].entry_point"),
        ("/modules/0/entry_point", json!("a b"), "modules[0].entry_point"),
        (
            "/modules/0/workgroup_size",
            json!([0, 1, 1]),
            "modules[0].workgroup_size",
        ),
        (
            "/modules/0/workgroup_size",
            json!([65536, 65536, 2]),
            "modules[0].workgroup_size",
        ),
        ("/modules/0/workgroup_size", json!([64, 1]), "invalid length 2"),
        (
            "/modules/0/workgroup_bytes",
            json!(4294967295_u32),
            "modules[0].workgroup_bytes",
        ),
        (
            "/modules/0/bindings/1/name",
            json!("runs"),
            "two have the bindings.name",
        ),
        (
            "/modules/0/bindings/1/binding",
            json!(2),
            "two have the group and binding",
        ),
        (
            "/modules/0/bindings/1/binding",
            json!(100000),
            "modules[0].bindings[1]",
        ),
        (
            "/modules/0/bindings/0/kind",
            json!("read"),
            "exactly one is a uniform",
        ),
        (
            "/modules/0/bindings/0/kind",
            json!("write"),
            "unknown variant `write`",
        ),
        ("/modules/0/params/size", json!(18), "modules[0].params"),
        (
            "/modules/0/params/size",
            json!(4294967292_u32),
            "modules[0].params",
        ),
        ("/modules/0/params/fields", json!([]), "modules[0].params"),
        (
            "/modules/0/params/fields/1/offset",
            json!(0),
            "modules[0].params.fields[1].offset",
        ),
        (
            "/modules/0/params/fields/1/offset",
            json!(4294967292_u32),
            "modules[0].params.fields[1].offset",
        ),
        (
            "/modules/0/params/fields/1/name",
            json!("runs"),
            "two have the fields.name",
        ),
        (
            "/modules/0/params/fields/0/type",
            json!("f64"),
            "unknown variant `f64`",
        ),
        (
            "/modules/0/dispatch/formula",
            json!("params.runs + 1"),
            "modules[0].dispatch.formula",
        ),
        (
            "/modules/0/dispatch/formula",
            json!("params.other"),
            "params.other is no u32 field",
        ),
        ("/modules/0/dispatch/z", json!(0), "modules[0].dispatch.z"),
        (
            "/modules/0/pages/side/page_words",
            json!(7),
            "modules[0].pages.side",
        ),
        ("/modules/0/pages/side/heads", json!(0), "modules[0].pages.side"),
        (
            "/modules/0/limits/maxStorageBuffersPerShaderStage",
            json!(9),
            "modules[0].portable",
        ),
        ("/vectors/0/folder", json!("vectors/../.."), "vectors[0].folder"),
        ("/vectors/0/folder", json!("/tmp"), "vectors[0].folder"),
        ("/vectors/0/folder", json!("C:\\x"), "vectors[0].folder"),
        ("/vectors/0/modules", json!(["other"]), "`other` is no module"),
    ] {
        let refused = read(&changed(pointer, to.clone())).expect_err(pointer);
        let Error::Manifest { file, .. } = &refused else {
            panic!("{refused}")
        };
        assert!(file.starts_with("m.json"), "{refused}");
        assert!(refused.to_string().contains(words), "{pointer} = {to}: {refused}");
    }
    // Fields that are missing, and fields that nobody knows, in every object: nothing is guessed, nothing is dropped.
    fn objects(value: &Value, at: String, found: &mut Vec<String>) {
        match value {
            Value::Object(fields) => {
                found.push(at.clone());
                fields
                    .iter()
                    .for_each(|(name, value)| objects(value, format!("{at}/{name}"), found));
            }
            Value::Array(items) => {
                items
                    .iter()
                    .enumerate()
                    .for_each(|(i, value)| objects(value, format!("{at}/{i}"), found));
            }
            _ => {}
        }
    }
    let mut all = Vec::new();
    objects(&good, String::new(), &mut all);
    assert!(all.len() > 50);
    for at in all {
        if at.ends_with("/pages") {
            continue; // its names are those of the shader
        }
        let mut value = good.clone();
        value.pointer_mut(&at).unwrap()["surprise"] = json!(1);
        let refused = read(&value).expect_err(&at).to_string();
        assert!(
            refused.contains("unknown field `surprise`") && refused.starts_with("m.json:1:"),
            "{refused}"
        );
        let names: Vec<String> = good
            .pointer(&at)
            .unwrap()
            .as_object()
            .unwrap()
            .keys()
            .cloned()
            .collect();
        for name in names {
            let mut value = good.clone();
            value
                .pointer_mut(&at)
                .unwrap()
                .as_object_mut()
                .unwrap()
                .remove(&name);
            read(&value).expect_err(&format!("{at}/{name}"));
        }
    }
}

#[test]
fn texts_that_are_no_json_are_refused_with_line_and_column() {
    let parse = |bytes: &[u8]| Manifest::parse("m.json", bytes).unwrap_err().to_string();
    assert!(parse(b"{\n  \"schema\": oops\n}").starts_with("m.json:2:13: "));
    assert!(parse(b"").starts_with("m.json:1:0: "));
    assert!(parse(&[b'['; 100_000]).starts_with("m.json:1:"));
    parse(b"[]");
    parse(b"\xff\xfe");
    parse(b"{\"schema\": \"kvpack.shaders\", \"version\": 1e400}");
    let good = small().to_string();
    for end in (0..good.len()).step_by(97) {
        parse(&good.as_bytes()[..end]);
    }
    let folder = tempfile::tempdir().unwrap();
    for path in [
        folder.path().to_owned(),
        folder.path().join("none.json"),
        PathBuf::from("/dev/zero"),
    ] {
        let refused = Manifest::read(&path).unwrap_err();
        assert!(matches!(refused, Error::Manifest { .. }), "{refused}");
    }
}
