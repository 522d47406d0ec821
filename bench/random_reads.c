/* Random reads of 4 KiB past the kernel's pages, for a container without any library.
 *
 *     cc -O2 -static -pthread random_reads.c -o random_reads
 *     random_reads FILE SECONDS THREADS      prints: reads, seconds, and those that failed
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { BYTES = 4096, THREADS_MAX = 64 };

static int file;
static uint64_t blocks;
static double until;

struct reader { pthread_t thread; uint64_t seed, reads, failed; };

static double now(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec + t.tv_nsec / 1e9;
}

static void *run(void *argument)
{
	struct reader *reader = argument;
	void *buffer = NULL;
	uint64_t x = reader->seed;
	if (posix_memalign(&buffer, BYTES, BYTES))
		return NULL;
	while (now() < until) {
		x ^= x << 13, x ^= x >> 7, x ^= x << 17; /* Marsaglia's xorshift */
		if (pread(file, buffer, BYTES, (off_t)(x % blocks * BYTES)) == BYTES)
			reader->reads++;
		else
			reader->failed++;
	}
	free(buffer);
	return NULL;
}

int main(int count, char **words)
{
	static struct reader readers[THREADS_MAX];
	struct stat found;
	int threads = count == 4 ? atoi(words[3]) : 0;
	if (threads < 1 || threads > THREADS_MAX) {
		fprintf(stderr, "usage: %s FILE SECONDS THREADS\n", words[0]);
		return 2;
	}
	file = open(words[1], O_RDONLY | O_DIRECT);
	if (file < 0 || fstat(file, &found) || found.st_size < BYTES) {
		perror(words[1]);
		return 1;
	}
	blocks = found.st_size / BYTES;
	double begun = now();
	until = begun + atof(words[2]);
	for (int i = 0; i < threads; i++) {
		readers[i].seed = 88172645463325252ull + 7919ull * i;
		pthread_create(&readers[i].thread, NULL, run, &readers[i]);
	}
	uint64_t reads = 0, failed = 0;
	for (int i = 0; i < threads; i++) {
		pthread_join(readers[i].thread, NULL);
		reads += readers[i].reads, failed += readers[i].failed;
	}
	printf("%llu %.6f %llu\n", (unsigned long long)reads, now() - begun, (unsigned long long)failed);
	return 0;
}
