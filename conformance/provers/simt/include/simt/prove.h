// Proofs of kernels: what to launch, what must hold, and the program that runs each under many schedules.
//
//   SIMT_PROOF("sums") {
//     auto out = trial.uninitialized<float>("out", 4);
//     trial.launch(Sum{trial.array<float>("in", {1, 2, 3, 4}), out}, {2, 64, 256});
//     trial.expect(out.values() == wanted, "the sums of the rows");
//   }
//   int main(int count, char** arguments) { return simt::prover::main(count, arguments); }
#pragma once

#include <cxxabi.h>

#include <chrono>
#include <cstdio>
#include <functional>
#include <initializer_list>
#include <typeinfo>

#include <simt/host.h>

namespace simt::prover {

// Memory of the device that a proof made. It converts to the span that a kernel takes.
template <typename T>
class Array {
 public:
  Array(Region* region, int64_t count) : region_(region), count_(count) {}
  operator Global<T>() const { return global(); }
  operator Global<const T>() const { return global(); }
  Global<T> global() const { return Global<T>(reinterpret_cast<T*>(region_->data), count_); }
  int64_t size() const { return count_; }
  std::vector<T> values() const {
    std::vector<T> result(static_cast<size_t>(count_));
    if (count_ > 0) std::memcpy(result.data(), region_->data, static_cast<size_t>(count_) * sizeof(T));
    return result;
  }
  Region* region() const { return region_; }

 private:
  Region* region_;
  int64_t count_;
};

inline std::string name_of(const std::type_info& type) {
  int status = 0;
  char* const text = abi::__cxa_demangle(type.name(), nullptr, nullptr, &status);
  std::string name = status == 0 ? text : type.name();
  std::free(text);
  return name;
}

// One run of a proof: the same program each time, but for the schedule and, from case to case, `random`.
class Trial {
 public:
  Trial(Schedule* schedule, int64_t case_number, uint64_t poison, const Limits& limits)
      : random(static_cast<uint64_t>(case_number) * 2654435761U + 1),
        case_number(case_number),
        world_(schedule, Random(poison), limits) {}

  // Numbers that depend on the case alone.
  Random random;
  const int64_t case_number;

  // Memory that begins `shift` elements after a multiple of 256 bytes.
  template <typename T>
  Array<T> array(std::string name, const std::vector<T>& values, int64_t shift = 0) {
    Array<T> made = uninitialized<T>(std::move(name), static_cast<int64_t>(values.size()), shift);
    if (values.empty()) return made;
    std::memcpy(made.region()->data, values.data(), values.size() * sizeof(T));
    std::fill(made.region()->is_written.begin(), made.region()->is_written.end(), uint8_t{1});
    return made;
  }
  // Memory that has to be written before it is read.
  template <typename T>
  Array<T> uninitialized(std::string name, int64_t count, int64_t shift = 0) {
    constexpr auto kSize = static_cast<int64_t>(sizeof(T));
    return {&world_.add_region(std::move(name), count * kSize, shift * kSize), count};
  }
  // The content is an order of its own in each run, such as slots that are given to whoever comes first.
  template <typename T>
  void may_differ(const Array<T>& array) {
    differing_.push_back(array.region());
  }

  template <typename Kernel>
  void launch(const Kernel& kernel, Shape shape, Site site = Site::here()) {
    static_assert(std::is_trivially_copyable_v<Kernel> && sizeof(Kernel) <= 4096, "not an argument of a launch");
    world_.launch(
        name_of(typeid(Kernel)), [](const void* argument) { (*static_cast<const Kernel*>(argument))(); }, &kernel,
        shape.blocks, shape.threads, Kernel::kThreads, shape.shared_bytes, site);
    if (world_.has_fault() || world_.is_pruned()) throw Stopped();
  }
  // Ends the run as a fault unless `holds`.
  void expect(bool holds, const std::string& what, Site site = Site::here()) {
    if (holds) return;
    world_.set_fault(kind::kWrongResult, what, {{"expect", 0, 0, site}});
    throw Stopped();
  }
  // That two lists are the same bits; names the first element that is not.
  template <typename T>
  void expect_same(const std::vector<T>& got, const std::vector<T>& expected, const std::string& what,
                   Site site = Site::here()) {
    expect(got.size() == expected.size(),
           what + ": got " + std::to_string(got.size()) + " elements, expected " + std::to_string(expected.size()),
           site);
    for (size_t i = 0; i < got.size(); ++i) {
      if (std::memcmp(&got[i], &expected[i], sizeof(T)) != 0)
        expect(false,
               what + ": element " + std::to_string(i) + ": got " + std::to_string(got[i]) + ", expected " +
                   std::to_string(expected[i]),
               site);
    }
  }

  World& world() { return world_; }
  bool is_compared(const Region& region) const {
    return std::find(differing_.begin(), differing_.end(), &region) == differing_.end();
  }

 private:
  World world_;
  std::vector<const Region*> differing_;
};

using Body = std::function<void(Trial&)>;

struct Proof {
  std::string name;
  Body body;
};

inline std::vector<Proof>& proofs() {
  static std::vector<Proof> all;
  return all;
}

struct Registered {
  Registered(std::string name, Body body) { proofs().push_back({std::move(name), std::move(body)}); }
};

#define SIMT_JOIN_2(a, b) a##b
#define SIMT_JOIN(a, b) SIMT_JOIN_2(a, b)
#define SIMT_PROOF(name)                                                                                               \
  static void SIMT_JOIN(simt_proof_, __LINE__)(simt::prover::Trial & trial);                                           \
  static const simt::prover::Registered SIMT_JOIN(simt_registered_, __LINE__)(name, SIMT_JOIN(simt_proof_, __LINE__)); \
  static void SIMT_JOIN(simt_proof_, __LINE__)([[maybe_unused]] simt::prover::Trial & trial)

struct Options {
  std::string only, replay;
  std::vector<std::string> policies{"random", "priority"};
  int64_t cases = 10, seeds = 100, most_runs = 100000, most_points = 4000000;
  bool keep_going = false, json = false;
};

struct Found {
  Fault fault;
  std::string replay;
  int64_t count;
};

struct Result {
  std::string name;
  int64_t runs = 0, points = 0, pruned = 0;
  bool is_complete = true;  // Of an exhaustive search: every case was searched to its end.
  double seconds = 0;
  std::vector<Found> found;
};

// Whether a fault is another sight of the same: kind and lines.
inline bool are_alike(const Fault& a, const Fault& b) {
  if (a.kind != b.kind || a.places.size() != b.places.size()) return false;
  for (size_t i = 0; i < a.places.size(); ++i) {
    if (a.places[i].site.line != b.places[i].site.line) return false;
  }
  return true;
}

struct Content {
  std::string name;
  std::vector<uint8_t> bytes, is_written;
};

class Prover {
 public:
  Prover(const Proof& proof, const Options& options) : proof_(proof), options_(options) {
    result_.name = proof.name;
    limits_.points = options.most_points;
  }

  Result prove() {
    const auto begun = std::chrono::steady_clock::now();
    for (int64_t number = 0; number < options_.cases && !is_over(); ++number) {
      is_first_ = true;
      for (const std::string& policy : options_.policies) {
        if (policy == "exhaustive") {
          exhaust(number);
        } else {
          sample(policy, number);
        }
      }
    }
    result_.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begun).count();
    return result_;
  }

  // Runs the one schedule that a token names. Returns whether the token was understood.
  bool replay(const std::string& token) {
    std::vector<std::string> words{""};
    for (const char c : token) {
      if (c == '/') {
        words.emplace_back();
      } else {
        words.back() += c;
      }
    }
    const auto number = [&](size_t i) { return std::strtoll(words[i].c_str(), nullptr, 10); };
    if (words.size() == 3 && words[0] == "random") {
      RandomSchedule schedule(static_cast<uint64_t>(number(2)));
      run(&schedule, number(1), static_cast<uint64_t>(number(2)), [&] { return token; });
    } else if (words.size() == 4 && words[0] == "priority") {
      PrioritySchedule schedule(static_cast<uint64_t>(number(2)), number(3));
      run(&schedule, number(1), static_cast<uint64_t>(number(2)), [&] { return token; });
    } else if (words.size() == 3 && words[0] == "exhaustive") {
      std::vector<int> path;
      for (const char* at = words[2].c_str(); *at != 0;) {
        char* end = nullptr;
        path.push_back(static_cast<int>(std::strtol(at, &end, 10)));
        at = *end == '.' ? end + 1 : end;
        if (end == at && *at != 0) return false;
      }
      ExhaustiveSchedule schedule(path);
      schedule.begin_run();
      run(&schedule, number(1), 0, [&] { return token; });
    } else {
      return false;
    }
    return true;
  }

  const Result& result() const { return result_; }

 private:
  bool is_over() const { return !options_.keep_going && !result_.found.empty(); }

  void sample(const std::string& policy, int64_t number) {
    const std::string head = policy + "/" + std::to_string(number) + "/";
    for (int64_t seed = 0; seed < options_.seeds && !is_over(); ++seed) {
      const auto random = static_cast<uint64_t>(seed);
      if (policy == "random") {
        RandomSchedule schedule(random);
        run(&schedule, number, random, [&] { return head + std::to_string(seed); });
        length_ = std::max<int64_t>(1, last_points_);
      } else {
        PrioritySchedule schedule(random, length_);
        run(&schedule, number, random, [&] { return head + std::to_string(seed) + "/" + std::to_string(length_); });
      }
    }
  }

  void exhaust(int64_t number) {
    ExhaustiveSchedule schedule;
    int64_t runs = 0;
    do {
      schedule.begin_run();
      run(&schedule, number, 0, [&] { return "exhaustive/" + std::to_string(number) + "/" + schedule.path(); });
      if (++runs >= options_.most_runs || is_over()) {
        result_.is_complete = false;
        return;
      }
    } while (schedule.advance());
  }

  template <typename Token>
  void run(Schedule* schedule, int64_t number, uint64_t poison, const Token& token) {
    Trial trial(schedule, number, poison, limits_);
    try {
      proof_.body(trial);
      if (!trial.world().has_fault()) compare(&trial, token());
    } catch (const Stopped&) {
    }
    World& world = trial.world();
    ++result_.runs;
    last_points_ = world.points();
    result_.points += last_points_;
    if (world.is_pruned()) {
      ++result_.pruned;
      if (world.points() > limits_.points) result_.is_complete = false;
    }
    if (!world.has_fault()) return;
    for (Found& known : result_.found) {
      if (are_alike(known.fault, world.fault())) {
        ++known.count;
        return;
      }
    }
    result_.found.push_back({world.fault(), token(), 1});
  }

  // The arrays of all runs of a case are alike, or the proof says that they need not be.
  void compare(Trial* trial, const std::string& token) {
    std::vector<Content> now;
    for (const auto& region : trial->world().regions()) {
      if (!trial->is_compared(*region)) continue;
      Content content{region->name, {region->data, region->data + region->size}, region->is_written};
      for (size_t i = 0; i < content.bytes.size(); ++i) content.bytes[i] &= content.is_written[i] != 0 ? 0xFF : 0;
      now.push_back(std::move(content));
    }
    if (is_first_) {
      is_first_ = false;
      first_ = std::move(now);
      first_token_ = token;
      return;
    }
    for (size_t i = 0; i < now.size() && i < first_.size(); ++i) {
      const size_t count = std::min(now[i].bytes.size(), first_[i].bytes.size());
      for (size_t byte = 0; byte < count; ++byte) {
        if (now[i].bytes[byte] == first_[i].bytes[byte] && now[i].is_written[byte] == first_[i].is_written[byte])
          continue;
        trial->world().set_fault(kind::kScheduleDependence,
                                 "byte " + std::to_string(byte) + " of " + now[i].name +
                                     " differs from that of the schedule " + first_token_,
                                 {});
        return;
      }
    }
  }

  const Proof& proof_;
  const Options& options_;
  Limits limits_;
  Result result_;
  std::vector<Content> first_;
  std::string first_token_;
  bool is_first_ = true;
  int64_t last_points_ = 0, length_ = 1000;
};

inline std::string quoted(const std::string& text) {
  std::string result = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') result += '\\';
    if (static_cast<unsigned char>(c) >= 0x20) result += c;
  }
  return result + '"';
}

inline std::string to_json(const Result& result) {
  std::string text = "{\"name\": " + quoted(result.name) + ", \"runs\": " + std::to_string(result.runs) +
                     ", \"points\": " + std::to_string(result.points) +
                     ", \"pruned\": " + std::to_string(result.pruned) +
                     ", \"is_complete\": " + (result.is_complete ? "true" : "false") +
                     ", \"seconds\": " + std::to_string(result.seconds) + ", \"faults\": [";
  for (size_t i = 0; i < result.found.size(); ++i) {
    const Found& found = result.found[i];
    text += (i > 0 ? ", " : "") + std::string("{\"kind\": ") + quoted(found.fault.kind) +
            ", \"kernel\": " + quoted(found.fault.kernel) + ", \"message\": " + quoted(found.fault.message) +
            ", \"replay\": " + quoted(found.replay) + ", \"count\": " + std::to_string(found.count) + ", \"places\": [";
    for (size_t j = 0; j < found.fault.places.size(); ++j) {
      const Place& place = found.fault.places[j];
      text += (j > 0 ? ", " : "") + std::string("{\"what\": ") + quoted(place.what) +
              ", \"block\": " + std::to_string(place.block) + ", \"thread\": " + std::to_string(place.thread) +
              ", \"file\": " + quoted(place.site.file) + ", \"line\": " + std::to_string(place.site.line) + "}";
    }
    text += "]}";
  }
  return text + "]}";
}

inline void print(const Result& result) {
  std::printf("%s: %lld runs, %lld scheduling points, %.2f s: %s\n", result.name.c_str(),
              static_cast<long long>(result.runs), static_cast<long long>(result.points), result.seconds,
              result.found.empty() ? "no fault" : "FAULTS");
  for (const Found& found : result.found) {
    std::printf("  %s in %s: %s\n", found.fault.kind.c_str(), found.fault.kernel.c_str(), found.fault.message.c_str());
    for (const Place& place : found.fault.places) {
      std::printf("    %s, block %lld thread %lld", place.what.c_str(), static_cast<long long>(place.block),
                  static_cast<long long>(place.thread));
      if (place.site.line > 0) std::printf(", %s:%d", place.site.file, place.site.line);
      std::printf("\n");
    }
    std::printf("    %lld times; replay with --only '%s' --replay %s\n", static_cast<long long>(found.count),
                result.name.c_str(), found.replay.c_str());
  }
}

inline bool parse(int count, char** arguments, Options* options) {
  for (int i = 1; i < count; ++i) {
    const std::string word = arguments[i];
    if (word == "--json") {
      options->json = true;
      continue;
    }
    if (word == "--keep-going") {
      options->keep_going = true;
      continue;
    }
    if (i + 1 >= count) return false;
    const std::string value = arguments[++i];
    const int64_t number = std::strtoll(value.c_str(), nullptr, 10);
    if (word == "--only") {
      options->only = value;
    } else if (word == "--replay") {
      options->replay = value;
    } else if (word == "--policies") {
      options->policies.assign(1, "");
      for (const char c : value) {
        if (c == ',') {
          options->policies.emplace_back();
        } else {
          options->policies.back() += c;
        }
      }
      for (const std::string& policy : options->policies) {
        if (policy != "random" && policy != "priority" && policy != "exhaustive") return false;
      }
    } else if (word == "--cases" && number > 0) {
      options->cases = number;
    } else if (word == "--seeds" && number > 0) {
      options->seeds = number;
    } else if (word == "--most-runs" && number > 0) {
      options->most_runs = number;
    } else if (word == "--most-points" && number > 0) {
      options->most_points = number;
    } else {
      return false;
    }
  }
  return true;
}

// The program: runs the proofs of this file. Returns 0 without a fault, 1 with one, 2 where nothing could be run.
inline int main(int count, char** arguments) {
  Options options;
  if (!parse(count, arguments, &options)) {
    std::fprintf(stderr,
                 "usage: %s [--only PROOF] [--policies random,priority,exhaustive] [--cases N] [--seeds N]\n"
                 "  [--replay TOKEN] [--most-runs N] [--most-points N] [--keep-going] [--json]\n",
                 arguments[0]);
    return 2;
  }
  int run_count = 0;
  bool has_faults = false;
  for (const Proof& proof : proofs()) {
    if (!options.only.empty() && options.only != proof.name) continue;
    Prover prover(proof, options);
    if (!options.replay.empty()) {
      if (!prover.replay(options.replay)) {
        std::fprintf(stderr, "replay: got '%s', which is no token of a report\n", options.replay.c_str());
        return 2;
      }
    } else {
      prover.prove();
    }
    const Result& result = prover.result();
    ++run_count;
    has_faults |= !result.found.empty();
    if (options.json) {
      std::printf("%s\n", to_json(result).c_str());
    } else {
      print(result);
    }
    std::fflush(stdout);
  }
  if (run_count == 0) {
    std::fprintf(stderr, "no proof named '%s'\n", options.only.c_str());
    return 2;
  }
  return has_faults ? 1 : 0;
}

}  // namespace simt::prover
