// Stands in for NVRTC: kernels are compiled for the processor, by the C++ compiler of the machine ($CXX or g++),
// behind the text of kernel.h. What comes out is a shared library with its length before it, which the stand-in
// for the driver loads.

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <fstream>
#include <map>
#include <sstream>
#include <string>
#include <vector>

static const char HEADER[] =
#include "kernel.h.inc"
    ;

struct Program {
    std::string source, log, code;
    std::vector<std::string> entries, names;
};

static std::string read(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    std::stringstream all;
    all << file.rdbuf();
    return all.str();
}

// Arrays whose length the launch says: the one that the block has.
static std::string with_dynamic(std::string text) {
    const std::string mark = "extern __shared__ double shared[];";
    for (size_t at; (at = text.find(mark)) != std::string::npos;)
        text.replace(at, mark.size(), "double* shared = (double*)stand_in::block->shared;");
    return text;
}

extern "C" {

int nvrtcVersion(int* major, int* minor) {
    // Code that was made behind another text must not be found in a cache.
    uint32_t hash = 2166136261u;
    for (const char* c = HEADER; *c; c++) hash = (hash ^ (unsigned char)*c) * 16777619u;
    *major = 0, *minor = (int)(hash >> 1);
    return 0;
}

int nvrtcCreateProgram(void** program, const char* source, const char*, int, const char* const*, const char* const*) {
    Program* made = new Program;
    made->source = source;
    *program = made;
    return 0;
}

int nvrtcDestroyProgram(void** program) {
    delete (Program*)*program;
    *program = nullptr;
    return 0;
}

int nvrtcAddNameExpression(void* program, const char* name) {
    Program* p = (Program*)program;
    p->entries.push_back(name);
    p->names.push_back("stand_in_entry_" + std::to_string(p->names.size()));
    return 0;
}

int nvrtcCompileProgram(void* program, int count, const char* const* options) {
    Program* p = (Program*)program;
    const char version[] = "--gpu-architecture=sm_";
    for (int i = 0; i < count; i++)
        if (!strncmp(options[i], version, strlen(version)) && atoi(options[i] + strlen(version)) > 200)
            return p->log = "nvrtc: error: invalid value for --gpu-architecture (-arch)", 5;
    char folder[] = "/tmp/stand_in_XXXXXX";
    if (!mkdtemp(folder)) return 1;
    std::string at = folder, text = std::string(HEADER) + "#line 1 \"kernels.cu\"\n" + with_dynamic(p->source);
    for (size_t i = 0; i < p->entries.size(); i++)
        text += "\nextern \"C\" void** " + p->names[i] + "(const stand_in::Launch* launch, void** arguments) {\n" +
                "    return stand_in::enter(" + p->entries[i] + ", launch, arguments);\n}\n";
    std::ofstream(at + "/kernels.cpp") << text;
    const char* compiler = getenv("CXX") ? getenv("CXX") : "g++";
    std::string command = std::string(compiler) + " -std=c++17 -O1 -fPIC -shared -mtls-dialect=gnu2 -ffp-contract=off -fno-strict-aliasing -w -march=native " +
                          at + "/kernels.cpp -o " + at + "/kernels.so 2> " + at + "/log";
    int status = system(command.c_str());
    p->log = read(at + "/log");
    std::string code = read(at + "/kernels.so");
    if (system(("rm -rf " + at).c_str())) return 1;
    if (status != 0) return 6;
    uint64_t length = code.size();
    p->code = std::string("STANDIN1") + std::string((const char*)&length, 8) + code;
    return 0;
}

int nvrtcGetLoweredName(void* program, const char* name, const char** lowered) {
    Program* p = (Program*)program;
    for (size_t i = 0; i < p->entries.size(); i++)
        if (p->entries[i] == name) return *lowered = p->names[i].c_str(), 0;
    return 8;
}

int nvrtcGetProgramLogSize(void* program, size_t* size) { return *size = ((Program*)program)->log.size() + 1, 0; }
int nvrtcGetProgramLog(void* program, char* log) {
    const std::string& text = ((Program*)program)->log;
    memcpy(log, text.c_str(), text.size() + 1);
    return 0;
}
int nvrtcGetCUBINSize(void* program, size_t* size) { return *size = ((Program*)program)->code.size(), 0; }
int nvrtcGetCUBIN(void* program, char* code) {
    const std::string& all = ((Program*)program)->code;
    memcpy(code, all.data(), all.size());
    return 0;
}

}  // extern "C"
