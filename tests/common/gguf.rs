//! Writes GGUF files for tests.

/// The parts of a GGUF file.
pub struct GgufWriter {
    version: u32,
    alignment: usize,
    pairs: Vec<Vec<u8>>,
    infos: Vec<Vec<u8>>,
    elements: Vec<u8>,
}

/// Returns a text with its length.
pub fn text(text: &str) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes()[..], text.as_bytes()].concat()
}

/// Returns an array's element type, length and elements.
pub fn array(kind: u32, elements: &[Vec<u8>]) -> Vec<u8> {
    [&kind.to_le_bytes()[..], &(elements.len() as u64).to_le_bytes(), &elements.concat()].concat()
}

impl GgufWriter {
    pub fn new() -> GgufWriter {
        GgufWriter::of_version(3, 32)
    }

    pub fn of_version(version: u32, alignment: usize) -> GgufWriter {
        GgufWriter { version, alignment, pairs: Vec::new(), infos: Vec::new(), elements: Vec::new() }
    }

    /// Adds a key with a value of the given type.
    pub fn pair(mut self, key: &str, kind: u32, value: &[u8]) -> GgufWriter {
        self.pairs.push([&text(key)[..], &kind.to_le_bytes(), value].concat());
        self
    }

    /// Adds a tensor behind the others. `shape` is row-major.
    pub fn tensor(mut self, name: &str, shape: &[u64], kind: u32, elements: &[u8]) -> GgufWriter {
        let offset = self.elements.len().next_multiple_of(self.alignment);
        self.elements.resize(offset, 0);
        self.elements.extend(elements);
        self.info(name, shape, kind, offset as u64)
    }

    /// Adds the description of a tensor.
    pub fn info(mut self, name: &str, shape: &[u64], kind: u32, offset: u64) -> GgufWriter {
        let sizes: Vec<u8> = shape.iter().rev().flat_map(|size| size.to_le_bytes()).collect();
        let rank = (shape.len() as u32).to_le_bytes();
        self.infos.push([&text(name)[..], &rank, &sizes, &kind.to_le_bytes(), &offset.to_le_bytes()].concat());
        self
    }

    pub fn finish(&self) -> Vec<u8> {
        let counts = [self.infos.len() as u64, self.pairs.len() as u64].map(u64::to_le_bytes).concat();
        let head = [&b"GGUF"[..], &self.version.to_le_bytes(), &counts].concat();
        let mut file = [head, self.pairs.concat(), self.infos.concat()].concat();
        file.resize(file.len().next_multiple_of(self.alignment), 0);
        file.extend(&self.elements);
        file
    }
}

/// Returns a file with a value of each type and a tensor of each supported type.
pub fn file_of_all_types() -> GgufWriter {
    let mut file = GgufWriter::new();
    let tokens = ["<s>", "a", "é"].map(text);
    let values: [(u32, &[u8]); 13] = [
        (0, &[200]),
        (1, &(-3i8).to_le_bytes()),
        (2, &60_000u16.to_le_bytes()),
        (3, &(-300i16).to_le_bytes()),
        (4, &4_000_000_000u32.to_le_bytes()),
        (5, &(-70_000i32).to_le_bytes()),
        (6, &1.5f32.to_le_bytes()),
        (7, &[1]),
        (8, &text("llama")),
        (9, &array(8, &tokens)),
        (10, &u64::MAX.to_le_bytes()),
        (11, &i64::MIN.to_le_bytes()),
        (12, &0.1f64.to_le_bytes()),
    ];
    for (kind, value) in values {
        file = file.pair(&format!("value.{kind}"), kind, value);
    }
    file = file.pair("integers", 9, &array(5, &[1, -2, 3].map(|n: i32| n.to_le_bytes().to_vec())));
    for (kind, bytes) in [(0, 4), (1, 2), (24, 1), (25, 2), (26, 4), (27, 8), (28, 8), (30, 2)] {
        file = file.tensor(&format!("plain.{kind}"), &[2, 3], kind, &vec![0; 6 * bytes]);
    }
    for (kind, len, bytes) in BLOCKS {
        let elements: Vec<u8> = (0..3 * 2 * bytes).map(|i| (i * 7 % 60) as u8).collect();
        file = file.tensor(&format!("quantised.{kind}"), &[3, 2 * len], kind, &elements);
    }
    file
}

/// The numbers of the quantised types, and the elements and the bytes of their blocks.
pub const BLOCKS: [(u32, u64, usize); 10] = [
    (2, 32, 18),
    (3, 32, 20),
    (6, 32, 22),
    (7, 32, 24),
    (8, 32, 34),
    (10, 256, 84),
    (11, 256, 110),
    (12, 256, 144),
    (13, 256, 176),
    (14, 256, 210),
];
