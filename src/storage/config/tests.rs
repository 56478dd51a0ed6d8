use std::time::Duration;

use proptest::prelude::*;

use super::*;

fn read(text: &str) -> Config {
    text.parse().unwrap_or_else(|e| panic!("{text}: {e}"))
}

fn error(text: &str) -> String {
    text.parse::<Config>().map(|config| panic!("{text} gave {config}")).unwrap_err().to_string()
}

#[test]
fn every_key_sets_its_field() {
    let d = Config::default;
    let mib = |n: usize| n << 20;
    let table = [
        ("backend:pool", Config { backend: Backend::Pool, ..d() }),
        ("backend:direct", Config { backend: Backend::Direct, ..d() }),
        ("max_split_size_mb:20", Config { max_split_size: mib(20), ..d() }),
        ("max_non_split_rounding_mb:64", Config { max_non_split_rounding: mib(64), ..d() }),
        ("large_segment_size_mb:32", Config { large_segment_size: mib(32), ..d() }),
        ("roundup_power2_divisions:8", Config { roundup_power2_divisions: [8; 16], ..d() }),
        ("garbage_collection_threshold:0.8", Config { garbage_collection_threshold: 0.8, ..d() }),
        ("per_process_memory_fraction:0", Config { per_process_memory_fraction: 0.0, ..d() }),
        ("expandable_segments:True", Config { expandable_segments: true, ..d() }),
        ("pinned_use_background_threads:True", Config { pinned_use_background_threads: true, ..d() }),
        ("pinned_reserve_segment_size_mb:1", Config { pinned_reserve_segment_size: mib(1), ..d() }),
        ("pinned_max_cached_size_mb:64", Config { pinned_max_cached_size: mib(64), ..d() }),
        ("memory_limit_mb:512", Config { memory_limit: mib(512), ..d() }),
        ("segments:pytorch", Config { segments: SegmentSizes::PyTorch, ..d() }),
        ("cross_stream_reuse:False", Config { cross_stream_reuse: false, ..d() }),
        ("compaction:False", Config { compaction: false, ..d() }),
        ("compaction_budget_mb:5", Config { compaction_budget: mib(5), ..d() }),
        ("spill:disk", Config { spill: Spill::Disk, ..d() }),
        ("spill_limit_mb:100", Config { spill_limit: mib(100), ..d() }),
        ("thread_cache_kb:3", Config { thread_cache: 3 << 10, ..d() }),
        ("decay_ms:1500", Config { decay: Duration::from_millis(1500), ..d() }),
        ("zero_fill:True", Config { zero_fill: true, ..d() }),
        ("junk_fill:True", Config { junk_fill: true, ..d() }),
        ("guard_bytes:True", Config { guard_bytes: true, ..d() }),
        ("pool_overfit:1.25", Config { pool_overfit: 1.25, ..d() }),
        ("memory:image", Config { memory: MemoryMode::Image, ..d() }),
        ("numa_local:False", Config { numa_local: false, ..d() }),
    ];
    for (text, config) in &table {
        assert_eq!(read(text), *config, "{text}");
        assert_eq!(config.to_string(), *text);
        config.check().unwrap();
    }
    for key in Config::KEYS {
        assert!(table.iter().any(|(text, _)| text.split(':').next() == Some(key.name)), "{} is not tested", key.name);
        assert!(!key.doc.is_empty() && key.to_string().contains(key.name));
    }
    let all: Vec<&str> = table.iter().map(|(text, _)| *text).skip(1).collect();
    assert_eq!(read(&all.join(",")).to_string(), all.join(","));
}

#[test]
fn alternative_spellings_are_accepted() {
    for text in [
        "",
        " \t",
        "backend:native",
        "backend:caching,",
        "max_split_size_mb:unlimited,memory_limit_mb:unlimited",
        "roundup_power2_divisions:[>:0]",
        "thread_cache_kb:1024,decay_ms:10000,pool_overfit:2",
        "expandable_segments : F a l s e\n",
    ] {
        assert_eq!(read(text), Config::default(), "{text}");
    }
    assert_eq!(Config::default().to_string(), "");
    assert_eq!(format!("{:>18}", read("zero_fill:True")), "    zero_fill:True");
}

#[test]
fn errors_name_the_mistake() {
    // A configuration text, and parts that its error message must contain.
    let table: &[(&str, &[&str])] = &[
        ("max_split_size:128", &["unknown key 'max_split_size'", "max_split_size_mb", "numa_local"]),
        ("zero_fill", &["'zero_fill' has no value", "key:value"]),
        ("zero_fill:", &["zero_fill has no value", "True or False"]),
        ("zero_fill:true", &["zero_fill", "'true'", "True or False"]),
        ("zero_fill:True,,junk_fill:True", &["'' has no value"]),
        ("zero_fill:True,zero_fill:False", &["zero_fill is given twice", "'False'"]),
        ("backend:cudaMallocAsync", &["backend", "'cudaMallocAsync'", "pool"]),
        ("max_split_size_mb:19", &["max_split_size_mb", "'19'", "20 or more"]),
        ("max_non_split_rounding_mb:19", &["max_non_split_rounding_mb", "'19'", "20 or more"]),
        ("large_segment_size_mb:19", &["large_segment_size_mb", "'19'", "20 or more"]),
        ("max_split_size_mb:-1", &["'-1'"]),
        ("max_split_size_mb:20.5", &["'20.5'"]),
        ("max_split_size_mb:99999999999999", &["'99999999999999'"]),
        ("max_split_size_mb:99999999999999999999999", &["MiB"]),
        ("garbage_collection_threshold:0", &["garbage_collection_threshold", "above 0 and below 1"]),
        ("garbage_collection_threshold:1", &["garbage_collection_threshold", "above 0 and below 1"]),
        ("garbage_collection_threshold:nan", &["'nan'"]),
        ("per_process_memory_fraction:1.01", &["per_process_memory_fraction", "from 0 to 1"]),
        ("per_process_memory_fraction:-0.5", &["'-0.5'"]),
        ("pinned_reserve_segment_size_mb:0", &["pinned_reserve_segment_size_mb", "1 or more"]),
        ("pool_overfit:0.5", &["pool_overfit", "1 or more"]),
        ("pool_overfit:inf", &["'inf'"]),
        ("roundup_power2_divisions:0", &["roundup_power2_divisions", "'0'"]),
        ("roundup_power2_divisions:3", &["'3'", "power of two"]),
        ("roundup_power2_divisions:[64:3]", &["'[64:3]'"]),
        ("roundup_power2_divisions:[48:8]", &["'[48:8]'"]),
        ("roundup_power2_divisions:[64]", &["'[64]'"]),
        ("roundup_power2_divisions:[]", &["'[]'"]),
        ("roundup_power2_divisions:[64:8,256:4", &["'[64:8,256:4'"]),
        ("roundup_power2_divisions:[64:8],zero_fill:1", &["zero_fill", "'1'"]),
        ("release_lock_on_cudamalloc:True", &["release_lock_on_cudamalloc has no meaning", "lock"]),
        ("graph_capture_record_stream_reuse:True", &["graph_capture_record_stream_reuse has no meaning", "capture"]),
        ("pinned_use_cuda_host_register:True", &["pinned_use_cuda_host_register has no meaning", "pin"]),
        ("pinned_num_register_threads:8", &["pinned_num_register_threads has no meaning", "pin"]),
        ("pinned_max_round_threshold_mb:8", &["pinned_max_round_threshold_mb has no meaning", "12.5 %"]),
        ("pinned_free_catch_all:True", &["pinned_free_catch_all has no meaning", "no errors"]),
        ("throw_on_cudamalloc_oom:True", &["throw_on_cudamalloc_oom has no meaning", "limit"]),
        ("expandable_segments_reserve:40G", &["expandable_segments_reserve has no meaning", "addresses"]),
        (
            "expandable_segments_reserve_by_class:[a:0.5]",
            &["expandable_segments_reserve_by_class has no meaning", "addresses"],
        ),
    ];
    for (text, parts) in table {
        let sentence = error(text);
        assert!(sentence.starts_with("CLAYSTONE_ALLOC_CONF: "), "{sentence}");
        assert!(parts.iter().all(|part| sentence.contains(part)), "{text}: {sentence}");
    }
}

/// Lists give the divisions that PyTorch's parser gives, as derived from its source.
#[test]
fn lists_of_divisions() {
    let table = [
        ("[64:8,128:2,256:4,512:2,1024:4,>:1]", [8, 8, 8, 8, 8, 8, 8, 2, 4, 2, 4, 1, 1, 1, 1, 1]),
        ("[2:4]", [4, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]),
        ("[1:4,8:2]", [4, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]),
        ("[1:0,16384:2,65536:16]", [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 2, 16]),
        ("[32768:2,>:4]", [2; 16]),
        ("[>:4]", [4; 16]),
    ];
    for (text, divisions) in table {
        let config = read(&format!("roundup_power2_divisions:{text}"));
        assert_eq!(config.roundup_power2_divisions, divisions, "{text}");
        assert_eq!(read(&config.to_string()), config, "{text}");
    }
}

#[test]
fn sizes_are_rounded_as_in_pytorch() {
    const MB: usize = 1 << 20;
    // Each row is (divisions, size, expected rounded size).
    let table = [
        (0, 0, 512),
        (0, 1, 512),
        (0, 512, 512),
        (0, 513, 1024),
        (0, 3 * MB + 1, 3 * MB + 512),
        (1, 3 * MB + 1, 3 * MB + 512),
        (4, 1, 512),
        (4, 2048, 2048),
        (4, 2049, 2560),
        (4, 5000, 5120),
        (4, 5121, 6144),
        (4, 1200, 1536),
        (2, MB + 1, MB + MB / 2),
        (2, MB + MB / 2 + 1, 2 * MB),
        (2, 2 * MB, 2 * MB),
        (8, 10 * MB + 1, 11 * MB),
    ];
    for (divisions, bytes, rounded) in table {
        let config = Config { roundup_power2_divisions: [divisions; 16], ..Config::default() };
        assert_eq!(config.round_size(bytes, 512), Some(rounded), "{divisions} divisions of {bytes}");
    }
    let mixed = read("roundup_power2_divisions:[64:8,128:2,256:4,512:2,1024:4,>:1]");
    for (mb, rounded) in [(1, 1), (65, 72), (129, 192), (300, 320), (600, 768), (1100, 1280), (2049, 2049)] {
        assert_eq!(mixed.round_size(mb * MB - 300, 512), Some(rounded * MB), "{mb} MiB");
    }
    let plain = Config::default();
    assert_eq!(plain.round_size(usize::MAX, 512), None);
    assert_eq!(plain.round_size(usize::MAX - 511, 512), Some(usize::MAX - 511));
    assert_eq!(plain.round_size(7, 64), Some(64));
    assert_eq!(read("roundup_power2_divisions:2").round_size(usize::MAX / 4 * 3 + 4, 512), None);
}

#[test]
fn environment_variables_configure_the_allocator() {
    let vars = Config::from_vars;
    assert_eq!(vars(None, None).unwrap(), Config::default());
    assert_eq!(vars(None, Some("1")).unwrap().backend, Backend::Direct);
    assert_eq!(vars(Some("backend:pool,zero_fill:True"), Some("1")).unwrap(), read("backend:direct,zero_fill:True"));
    assert_eq!(vars(Some("backend:pool"), Some("0")).unwrap().backend, Backend::Pool);
    let sentence = vars(None, Some("yes")).unwrap_err().to_string();
    assert!(sentence.contains("CLAYSTONE_NO_CACHING") && sentence.contains("'yes'"), "{sentence}");
    assert!(vars(Some("x:1"), Some("1")).is_err());
}

#[test]
fn values_that_text_cannot_express_are_refused() {
    let d = Config::default;
    let mut uneven = [0; 16];
    uneven[3] = 6;
    let table = [
        ("max_split_size_mb", Config { max_split_size: 1 << 20, ..d() }),
        ("max_split_size_mb", Config { max_split_size: (30 << 20) + 1, ..d() }),
        ("max_non_split_rounding_mb", Config { max_non_split_rounding: usize::MAX, ..d() }),
        ("large_segment_size_mb", Config { large_segment_size: 0, ..d() }),
        ("roundup_power2_divisions", Config { roundup_power2_divisions: uneven, ..d() }),
        ("garbage_collection_threshold", Config { garbage_collection_threshold: 1.0, ..d() }),
        ("per_process_memory_fraction", Config { per_process_memory_fraction: f64::NAN, ..d() }),
        ("thread_cache_kb", Config { thread_cache: 1000, ..d() }),
        ("decay_ms", Config { decay: Duration::from_micros(1), ..d() }),
        ("decay_ms", Config { decay: Duration::MAX, ..d() }),
        ("pool_overfit", Config { pool_overfit: 0.99, ..d() }),
    ];
    for (key, config) in table {
        let sentence = config.check().unwrap_err().to_string();
        assert!(sentence.contains(&format!("{key} cannot be")), "{key}: {sentence}");
    }
    Config::default().check().unwrap();
}

/// Generates any configuration that can be written as text.
fn configs() -> impl Strategy<Value = Config> {
    let mib = |least: usize| (least..100_000).prop_map(|n| n << 20);
    let part = prop_oneof![Just(0), (0..40u32).prop_map(|n| 1usize << n)];
    let runs = prop::collection::vec((part, 1..=ROUNDUP_INTERVALS), 1..=6).prop_map(|runs| {
        let mut all = runs.into_iter().flat_map(|(n, times)| std::iter::repeat_n(n, times)).cycle();
        std::array::from_fn(|_| all.next().unwrap_or(0))
    });
    let backend = prop::sample::select(vec![Backend::Caching, Backend::Pool, Backend::Direct]);
    let memory = prop::sample::select(vec![MemoryMode::Buffer, MemoryMode::Image, MemoryMode::Auto]);
    let sizes =
        (prop_oneof![Just(usize::MAX), mib(20)], mib(20), mib(20), mib(0), prop_oneof![Just(usize::MAX), mib(0)]);
    let parts = (prop_oneof![Just(0.0), 1e-9..0.999], 0.0..=1.0f64, 1.0..1e9f64, mib(0), 0..1usize << 20, 0..u64::MAX);
    (backend, memory, sizes, parts, runs, any::<[bool; 11]>()).prop_map(|(backend, memory, sizes, parts, runs, on)| {
        Config {
            backend,
            memory,
            max_split_size: sizes.0,
            max_non_split_rounding: sizes.1,
            large_segment_size: sizes.2,
            roundup_power2_divisions: runs,
            garbage_collection_threshold: parts.0,
            per_process_memory_fraction: parts.1,
            expandable_segments: on[0],
            pinned_use_background_threads: on[1],
            pinned_reserve_segment_size: sizes.3,
            pinned_max_cached_size: sizes.4,
            memory_limit: sizes.4,
            segments: if on[2] { SegmentSizes::PyTorch } else { SegmentSizes::Adaptive },
            cross_stream_reuse: on[3],
            compaction: on[4],
            compaction_budget: parts.3,
            thread_cache: parts.4 << 10,
            decay: Duration::from_millis(parts.5),
            zero_fill: on[5],
            junk_fill: on[6],
            guard_bytes: on[7],
            pool_overfit: parts.2,
            numa_local: on[8],
            spill: [Spill::Off, Spill::Host, Spill::Disk][usize::from(on[9]) + usize::from(on[10])],
            spill_limit: sizes.4,
        }
    })
}

proptest! {
    #[test]
    fn display_reads_back(config in configs()) {
        prop_assert_eq!(&read(&config.to_string()), &config);
        prop_assert!(config.check().is_ok());
    }

    #[test]
    fn no_text_panics(text in any::<String>()) {
        let _ = text.parse::<Config>();
    }

    /// Random text of plausible characters does not panic, and a value that parses prints as text that parses to the same value.
    #[test]
    fn near_misses_do_not_panic(key in 0..Config::KEYS.len(), value in "[\\[\\]:,>0-9a-zTrueFals. -]{0,12}") {
        if let Ok(config) = format!("{}:{value}", Config::KEYS[key].name).parse::<Config>() {
            prop_assert_eq!(read(&config.to_string()), config);
        }
    }

    #[test]
    fn rounding_wastes_no_more_than_a_division(config in configs(), bytes in 0..1usize << 40, log2 in 6..13u32) {
        let alignment = 1 << log2;
        let rounded = config.round_size(bytes, alignment).unwrap();
        prop_assert!(rounded >= bytes.max(1) && rounded % alignment == 0);
        prop_assert_eq!(config.round_size(rounded, alignment), Some(rounded), "a rounded size stays");
        let finest = config.roundup_power2_divisions.iter().copied().filter(|n| *n > 1).min();
        let part = finest.map_or(0, |n| bytes.next_power_of_two() / n);
        prop_assert!(rounded - bytes <= part.max(alignment));
    }
}
