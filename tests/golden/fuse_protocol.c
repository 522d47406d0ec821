/* Bytes of the structures of linux/fuse.h, each field with its place in the structure times 0x0101 (padding: none):
       cc -o /tmp/fuse_protocol tests/golden/fuse_protocol.c && /tmp/fuse_protocol > tests/golden/fuse_protocol.json
   Structures that grew after 7.38 are written out here, so that an older header will do. */
#include <stdio.h>
#include <string.h>
#include <linux/fuse.h>

struct fuse_new_init_in { uint32_t major, minor, max_readahead, flags, flags2, unused[11]; };
struct fuse_new_init_out {
	uint32_t major, minor, max_readahead, flags;
	uint16_t max_background, congestion_threshold;
	uint32_t max_write, time_gran;
	uint16_t max_pages, map_alignment;
	uint32_t flags2, max_stack_depth;
	uint16_t request_timeout, unused[11];
};
struct fuse_new_open_out { uint64_t fh; uint32_t open_flags; int32_t backing_id; };
struct fuse_new_statx_in { uint32_t getattr_flags, reserved; uint64_t fh; uint32_t sx_flags, sx_mask; };
struct sx_time { int64_t sec; uint32_t nsec; int32_t reserved; };
struct sx {
	uint32_t mask, blksize; uint64_t attributes; uint32_t nlink, uid, gid; uint16_t mode, spare0[1];
	uint64_t ino, size, blocks, attributes_mask; struct sx_time atime, btime, ctime, mtime;
	uint32_t rdev_major, rdev_minor, dev_major, dev_minor; uint64_t spare2[14];
};
struct fuse_new_statx_out { uint64_t attr_valid; uint32_t attr_valid_nsec, flags; uint64_t spare[2]; struct sx stat; };
struct fuse_new_prune_out { uint32_t count, padding; uint64_t spare; };
struct fuse_new_setxattr_in { uint32_t size, flags, setxattr_flags, padding; };

static int begun;
static void print(const char *name, const void *at, size_t length) {
	printf("%s\n \"%s\": \"", begun++ ? "," : "{", name);
	for (size_t i = 0; i < length; i++) printf("%02x", ((const unsigned char *)at)[i]);
	printf("\"");
}
#define BEGIN(name) { struct fuse_##name v; int i = 0; memset(&v, 0, sizeof v);
#define SET(field) v.field = ++i * 0x0101;
#define END(name) print(#name, &v, sizeof v); }

int main(void) {
	BEGIN(read_in) SET(fh) SET(offset) SET(size) SET(read_flags) SET(lock_owner) SET(flags) END(read_in)
	BEGIN(write_in) SET(fh) SET(offset) SET(size) SET(write_flags) SET(lock_owner) SET(flags) END(write_in)
	BEGIN(forget_in) SET(nlookup) END(forget_in)
	BEGIN(forget_one) SET(nodeid) SET(nlookup) END(forget_one)
	BEGIN(batch_forget_in) SET(count) END(batch_forget_in)
	BEGIN(getattr_in) SET(getattr_flags) SET(fh) END(getattr_in)
	BEGIN(setattr_in) SET(valid) SET(fh) SET(size) SET(lock_owner) SET(atime) SET(mtime) SET(ctime) SET(atimensec)
		 SET(mtimensec) SET(ctimensec) SET(mode) SET(uid) SET(gid) END(setattr_in)
	BEGIN(mknod_in) SET(mode) SET(rdev) SET(umask) END(mknod_in)
	BEGIN(mkdir_in) SET(mode) SET(umask) END(mkdir_in)
	BEGIN(rename_in) SET(newdir) END(rename_in)
	BEGIN(rename2_in) SET(newdir) SET(flags) END(rename2_in)
	BEGIN(link_in) SET(oldnodeid) END(link_in)
	BEGIN(open_in) SET(flags) SET(open_flags) END(open_in)
	BEGIN(create_in) SET(flags) SET(mode) SET(umask) SET(open_flags) END(create_in)
	BEGIN(release_in) SET(fh) SET(flags) SET(release_flags) SET(lock_owner) END(release_in)
	BEGIN(flush_in) SET(fh) SET(unused) SET(lock_owner) END(flush_in)
	BEGIN(fsync_in) SET(fh) SET(fsync_flags) END(fsync_in)
	BEGIN(getxattr_in) SET(size) END(getxattr_in)
	BEGIN(lk_in) SET(fh) SET(owner) SET(lk.start) SET(lk.end) SET(lk.type) SET(lk.pid) SET(lk_flags) END(lk_in)
	BEGIN(access_in) SET(mask) END(access_in)
	BEGIN(interrupt_in) SET(unique) END(interrupt_in)
	BEGIN(bmap_in) SET(block) SET(blocksize) END(bmap_in)
	BEGIN(ioctl_in) SET(fh) SET(flags) SET(cmd) SET(arg) SET(in_size) SET(out_size) END(ioctl_in)
	BEGIN(poll_in) SET(fh) SET(kh) SET(flags) SET(events) END(poll_in)
	BEGIN(notify_retrieve_in) SET(offset) SET(size) END(notify_retrieve_in)
	BEGIN(fallocate_in) SET(fh) SET(offset) SET(length) SET(mode) END(fallocate_in)
	BEGIN(lseek_in) SET(fh) SET(offset) SET(whence) END(lseek_in)
	BEGIN(copy_file_range_in) SET(fh_in) SET(off_in) SET(nodeid_out) SET(fh_out) SET(off_out) SET(len) SET(flags) END(copy_file_range_in)
	BEGIN(setupmapping_in) SET(fh) SET(foffset) SET(len) SET(flags) SET(moffset) END(setupmapping_in)
	BEGIN(removemapping_in) SET(count) END(removemapping_in)
	BEGIN(removemapping_one) SET(moffset) SET(len) END(removemapping_one)
	BEGIN(in_header) SET(len) SET(opcode) SET(unique) SET(nodeid) SET(uid) SET(gid) SET(pid) SET(total_extlen) END(in_header)
	BEGIN(out_header) SET(len) SET(error) SET(unique) END(out_header)
	BEGIN(attr_out) SET(attr_valid) SET(attr_valid_nsec) SET(attr.ino) SET(attr.size) SET(attr.blocks) SET(attr.atime)
		 SET(attr.mtime) SET(attr.ctime) SET(attr.atimensec) SET(attr.mtimensec) SET(attr.ctimensec) SET(attr.mode)
		 SET(attr.nlink) SET(attr.uid) SET(attr.gid) SET(attr.rdev) SET(attr.blksize) SET(attr.flags) END(attr_out)
	BEGIN(entry_out) SET(nodeid) SET(generation) SET(entry_valid) SET(attr_valid) SET(entry_valid_nsec)
		 SET(attr_valid_nsec) SET(attr.ino) SET(attr.size) SET(attr.blocks) SET(attr.atime) SET(attr.mtime) SET(attr.ctime)
		 SET(attr.atimensec) SET(attr.mtimensec) SET(attr.ctimensec) SET(attr.mode) SET(attr.nlink) SET(attr.uid)
		 SET(attr.gid) SET(attr.rdev) SET(attr.blksize) SET(attr.flags) END(entry_out)
	BEGIN(write_out) SET(size) END(write_out)
	BEGIN(getxattr_out) SET(size) END(getxattr_out)
	BEGIN(poll_out) SET(revents) END(poll_out)
	BEGIN(statfs_out) SET(st.blocks) SET(st.bfree) SET(st.bavail) SET(st.files) SET(st.ffree) SET(st.bsize)
		 SET(st.namelen) SET(st.frsize) END(statfs_out)
	BEGIN(lk_out) SET(lk.start) SET(lk.end) SET(lk.type) SET(lk.pid) END(lk_out)
	BEGIN(bmap_out) SET(block) END(bmap_out)
	BEGIN(lseek_out) SET(offset) END(lseek_out)
	BEGIN(ioctl_out) SET(result) SET(flags) SET(in_iovs) SET(out_iovs) END(ioctl_out)
	BEGIN(dirent) SET(ino) SET(off) SET(namelen) SET(type) END(dirent)
	BEGIN(notify_inval_inode_out) SET(ino) SET(off) SET(len) END(notify_inval_inode_out)
	BEGIN(notify_inval_entry_out) SET(parent) SET(namelen) SET(flags) END(notify_inval_entry_out)
	BEGIN(notify_delete_out) SET(parent) SET(child) SET(namelen) END(notify_delete_out)
	BEGIN(notify_store_out) SET(nodeid) SET(offset) SET(size) END(notify_store_out)
	BEGIN(notify_retrieve_out) SET(notify_unique) SET(nodeid) SET(offset) SET(size) END(notify_retrieve_out)
	BEGIN(notify_poll_wakeup_out) SET(kh) END(notify_poll_wakeup_out)
	BEGIN(new_init_in) SET(major) SET(minor) SET(max_readahead) SET(flags) SET(flags2) END(new_init_in)
	BEGIN(new_init_out) SET(major) SET(minor) SET(max_readahead) SET(flags) SET(max_background) SET(congestion_threshold)
		 SET(max_write) SET(time_gran) SET(max_pages) SET(map_alignment) SET(flags2) SET(max_stack_depth)
		 SET(request_timeout) END(new_init_out)
	BEGIN(new_open_out) SET(fh) SET(open_flags) SET(backing_id) END(new_open_out)
	BEGIN(new_statx_in) SET(getattr_flags) SET(fh) SET(sx_flags) SET(sx_mask) END(new_statx_in)
	BEGIN(new_statx_out) SET(attr_valid) SET(attr_valid_nsec) SET(flags) SET(stat.mask) SET(stat.blksize)
		 SET(stat.attributes) SET(stat.nlink) SET(stat.uid) SET(stat.gid) SET(stat.mode) SET(stat.ino) SET(stat.size)
		 SET(stat.blocks) SET(stat.attributes_mask) SET(stat.atime.sec) SET(stat.atime.nsec) SET(stat.btime.sec)
		 SET(stat.btime.nsec) SET(stat.ctime.sec) SET(stat.ctime.nsec) SET(stat.mtime.sec) SET(stat.mtime.nsec)
		 SET(stat.rdev_major) SET(stat.rdev_minor) SET(stat.dev_major) SET(stat.dev_minor) END(new_statx_out)
	BEGIN(new_prune_out) SET(count) END(new_prune_out)
	BEGIN(new_setxattr_in) SET(size) SET(flags) SET(setxattr_flags) END(new_setxattr_in)
	printf("\n}\n");
	return 0;
}
