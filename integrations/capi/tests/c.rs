//! Compiles C programs that use the API with gcc and sanitizers, and runs them on the CPU device and every OpenCL device.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use claystone::Device;

const HOME: &str = env!("CARGO_MANIFEST_DIR");

/// Returns the folder that holds this test program and the library.
fn built() -> PathBuf {
    let test = std::env::current_exe().expect("this test is a file");
    test.parent().expect("in a folder").to_owned()
}

fn run(command: &mut Command) -> Output {
    let output = command.output().unwrap_or_else(|e| panic!("{command:?}: {e}"));
    let (out, errors) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{command:?}: {}\n{out}\n{errors}", output.status);
    output
}

/// Compiles a program. `flags` end with the linker options.
fn compile(source: &Path, program: &Path, flags: &[&str]) {
    run(Command::new("gcc")
        .args(["-std=c11", "-Wall", "-Wextra", "-Werror", "-g", "-I"])
        .arg(Path::new(HOME).join("include"))
        .arg("-o")
        .arg(program)
        .arg(source)
        .args(flags));
}

/// Writes the C program in README.md to a file, and returns the file's path.
fn example(folder: &Path) -> PathBuf {
    let readme = fs::read_to_string(Path::new(HOME).join("README.md")).expect("README.md is read");
    let (_, code) = readme.split_once("```c\n").expect("README.md has a C program");
    let (code, _) = code.split_once("```").expect("which ends");
    let file = folder.join("example.c");
    fs::write(&file, code).expect("the folder can be written to");
    file
}

#[test]
fn c_programs_run_on_every_device_under_sanitizers() {
    let (folder, built) = (tempfile::tempdir().unwrap(), built());
    let (library, path) = (built.display().to_string(), format!("-Wl,-rpath,{}", built.display()));
    let linked = [
        "-fsanitize=address,undefined",
        "-fno-sanitize-recover=all",
        "-L",
        &library,
        &path,
        "-lclaystone_capi",
        "-lm",
        "-lpthread",
    ];
    let (api, shown) = (folder.path().join("api"), folder.path().join("example"));
    compile(&Path::new(HOME).join("tests/api.c"), &api, &linked);
    compile(&example(folder.path()), &shown, &linked);

    // Compilers inside OpenCL drivers leak memory. Only a leak with a function of this API in its call stack fails the test.
    let suppressions = folder.path().join("suppressions");
    fs::write(&suppressions, "leak:libpocl\nleak:libLLVM\nleak:libOpenCL\n").unwrap();
    let options = format!("suppressions={}:print_suppressions=0", suppressions.display());
    let run = |program: &mut Command| run(program.env("LSAN_OPTIONS", &options).env("ASAN_OPTIONS", "detect_leaks=1"));
    let opencl = Device::all().iter().filter(|&&device| device != Device::Cpu).count();
    assert!(opencl > 0 || std::env::var_os("CLAYSTONE_REQUIRE_OPENCL").is_none(), "there is no OpenCL device");
    for device in -1..opencl as i32 {
        let output = run(Command::new(&api).arg(device.to_string()));
        assert!(output.stdout.ends_with(b"passed\n"), "device {device}");
    }
    assert_eq!(run(&mut Command::new(&shown)).stdout, b"0.090 0.245 0.665\n");
}

#[test]
fn static_library_links_with_system_libraries_only() {
    let (folder, built) = (tempfile::tempdir().unwrap(), built());
    let program = folder.path().join("example");
    // If workspace features enable MPI, --gc-sections drops it, because nothing in the API refers to it.
    let library = built.join("libclaystone_capi.a").display().to_string();
    compile(&example(folder.path()), &program, &[&library, "-Wl,--gc-sections", "-lm", "-lpthread", "-ldl"]);
    assert_eq!(run(&mut Command::new(&program)).stdout, b"0.090 0.245 0.665\n");
}
